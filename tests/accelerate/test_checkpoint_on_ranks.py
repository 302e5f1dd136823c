"""Saving and loading with several processes: together or not at all."""

from __future__ import annotations

import errno
import os
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from accel_ops.collectives.agreement import Ranks, find_storage
from accel_ops.files import durable
from accel_state.processes import PartialState
from accelerate.checkpoint.manifest import Manifest
from tests.support.keeping import Counter, make_kept
from tests.support.ranks import ranks


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


SHARED = ["custom_checkpoint_0.pkl", "manifest.json", "model.safetensors", "optimizer.bin", "scheduler.bin"]


@ranks(2)
def test_what_there_is_one_of_is_written_once(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    random.seed(rank)
    kept.save_state(tmp_path / "state")
    wanted = random.random()
    assert files(tmp_path / "state") == sorted([*SHARED, "random_states_0.pkl", "random_states_1.pkl"])
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None
    assert manifest.world_size == 2
    kept.fill(4.0)
    random.seed(5)
    kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}
    assert random.random() == wanted
    assert wanted == (0.8444218515250481 if rank == 0 else 0.13436424411240122)


@ranks(2)
def test_processes_that_name_different_folders_share_that_of_the_first(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / f"mine-{rank}")  # as when each process makes a temporary folder
    kept.fill(4.0)
    kept.load_state(tmp_path / f"mine-{rank}")
    assert kept.values() == {3.0}
    dist.barrier()
    assert "mine-1" not in os.listdir(tmp_path)


@ranks(2)
def test_automatic_names_are_agreed_on(rank: int, tmp_path: Path) -> None:
    kept = make_kept(tmp_path, total_limit=1)
    for value in range(3):
        kept.fill(value)
        kept.save_state()
    dist.barrier()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_2"]
    kept.load_state()
    assert kept.values() == {2.0}
    assert kept.project_configuration.iteration == 3


@ranks(2)
@pytest.mark.parametrize("unlucky", [0, 1])
def test_a_disk_that_is_full_for_one_stops_all(rank: int, unlucky: int, tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    kept.fill(4.0)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    real_write = durable.os.write
    if rank == unlucky:
        durable.os.write = full
    try:
        with pytest.raises(OSError if rank == unlucky else RuntimeError, match="No space left on device") as caught:
            kept.save_state(tmp_path / "state")
    finally:
        durable.os.write = real_write
    if rank != unlucky:
        assert f"Process {unlucky} could not write its files of the checkpoint" in str(caught.value)
    dist.barrier()
    assert os.listdir(tmp_path) == ["state"]
    kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


@ranks(2)
def test_a_state_that_would_not_load_stops_all(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    kept._custom_objects.append(Counter(object()))
    with pytest.raises((TypeError, RuntimeError), match="registered object 1"):
        kept.save_state(tmp_path / "state")
    dist.barrier()
    assert not os.listdir(tmp_path)


@ranks(2)
def test_a_damaged_file_stops_all_before_anything_changes(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    kept.fill(4.0)
    dist.barrier()
    for name in ("random_states_1.pkl", "model.safetensors"):
        path = tmp_path / "state" / name
        whole = path.read_bytes()
        dist.barrier()
        if rank == 0:
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        dist.barrier()
        with pytest.raises((ValueError, RuntimeError), match=f"{name}.*checksum|{name}.*loaded"):
            kept.load_state(tmp_path / "state")
        assert kept.values() == {4.0}
        dist.barrier()
        if rank == 0:
            path.write_bytes(whole)
        dist.barrier()
    kept.load_state(tmp_path / "state")


@ranks(2)
def test_all_pass_over_a_damaged_checkpoint_that_one_has_found(rank: int, tmp_path: Path) -> None:
    kept = make_kept(tmp_path)
    for value in range(2):
        kept.fill(value)
        kept.save_state()
    names = sorted(files(tmp_path / "checkpoints" / "checkpoint_1"))
    for name in names[:2]:  # each rank verifies some of the files
        dist.barrier()
        if rank == 0:
            path = tmp_path / "checkpoints" / "checkpoint_1" / name
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        dist.barrier()
        kept.fill(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept.load_state()
        assert kept.values() == {0.0}
        assert len([one for one in caught if "is damaged" in str(one.message)]) == (1 if rank == 0 else 0)


@ranks(2)
def test_fewer_processes_can_go_on(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    kept.fill(4.0)
    kept.state = SimpleNamespace(num_processes=1, process_index=0, local_process_index=0, device=kept.state.device)
    with pytest.warns(UserWarning, match="num_processes=2 and is loaded with num_processes=1"):
        kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


@ranks(2)
def test_more_processes_can_go_on(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    both, kept.state = kept.state, SimpleNamespace(num_processes=1, process_index=0, local_process_index=0)
    if rank == 0:
        kept.save_state(tmp_path / "state")
    dist.barrier()
    kept.fill(4.0)
    kept.state = both
    random.seed(7)
    wanted = random.random()
    random.seed(7)
    if rank == 0:
        with pytest.warns(UserWarning, match="no RNG states for process 1"):
            kept.load_state(tmp_path / "state")
    else:
        kept.load_state(tmp_path / "state")
        assert random.random() == wanted
    assert kept.values() == {3.0}


def on_a_machine_of_its_own(rank: int) -> Any:
    return SimpleNamespace(num_processes=2, process_index=rank, local_process_index=0, device=PartialState().device)


@ranks(2)
@pytest.mark.parametrize("on_each_node", [False, True])
def test_machines_without_a_common_file_system(rank: int, on_each_node: bool, tmp_path: Path) -> None:
    kept = make_kept()
    kept.state = on_a_machine_of_its_own(rank)
    kept.project_configuration.save_on_each_node = on_each_node
    mine = tmp_path / f"disk{rank}" / "state"
    kept.fill(3.0)
    kept.save_state(mine)
    shared = SHARED if on_each_node or rank == 0 else ["manifest.json"]
    assert files(mine) == sorted([*shared, f"random_states_{rank}.pkl"])
    assert sorted(os.listdir(mine.parent)) == ["state"]
    if on_each_node:
        kept.fill(4.0)
        kept.load_state(mine)
        assert kept.values() == {3.0}


@ranks(2)
def test_machines_with_a_common_file_system_write_once(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    kept.state = on_a_machine_of_its_own(rank)
    kept.project_configuration.save_on_each_node = True
    kept.save_state(tmp_path / "state")
    assert files(tmp_path / "state") == sorted([*SHARED, "random_states_0.pkl", "random_states_1.pkl"])
    kept.load_state(tmp_path / "state")
    kept.save_model(kept._models[0], tmp_path / "model")
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["model", "state"]


@ranks(2)
def test_storage_is_that_of_the_first_process_on_one_machine(rank: int, tmp_path: Path) -> None:
    storage = find_storage(Ranks(PartialState()), tmp_path / "state")
    assert (storage.owner, storage.is_owner) == (0, rank == 0)
    assert storage.writes_shared(True) == (rank == 0)


@ranks(3)
def test_all_hear_of_the_first_error(rank: int) -> None:
    group = Ranks(PartialState())

    def work() -> int:
        if rank:
            raise KeyError(f"on {rank}")
        return 5

    if rank:
        with pytest.raises(KeyError, match=f"on {rank}"):
            group.together("count", work)
    else:
        with pytest.raises(RuntimeError, match=r"Process 1 \(and 1 more\) could not count: KeyError: 'on 1'"):
            group.together("count", work)
    assert group.together("count", lambda: rank) == [0, 1, 2]
    assert group.on_main("count", lambda: rank + 7) == 7
