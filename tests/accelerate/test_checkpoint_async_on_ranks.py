"""Checkpoints that several ranks write while training goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from accel_ops.collectives import participants
from accel_ops.files import durable
from accel_state.processes import PartialState
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.checkpoint.manifest import Manifest
from tests.support.changed_engines import ENGINES, run_of
from tests.support.held_writer import HeldWriter
from tests.support.keeping import Counter, make_kept
from tests.support.ranks import ranks


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint, without the manifest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def full(*args: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def full_disk(is_full: bool) -> Any:
    """A block in which this rank's disk is full."""
    real_write = durable.os.write
    if is_full:
        durable.os.write = full
    try:
        yield
    finally:
        durable.os.write = real_write


@ranks(2)
def test_ranks_train_on_while_they_write(rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def train() -> None:
        accelerator.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    train()
    held = HeldWriter(monkeypatch)
    accelerator.save_state(tmp_path / "at once")
    saving = accelerator.save_state(tmp_path / "later", async_save=True)
    for _ in range(3):
        train()
    accelerator.wait_for_everyone()
    assert not (tmp_path / "later").exists()
    held.release()
    assert saving.result() == tmp_path / "later"
    wanted = contents(tmp_path / "at once")
    assert sorted(wanted) == ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"]
    assert contents(tmp_path / "later") == wanted
    assert sorted(json.loads((tmp_path / "later" / "manifest.json").read_text())["files"]) == sorted(wanted)
    dist.barrier()
    accelerator.load_state(saving)


@ranks(2)
@pytest.mark.parametrize("unlucky", [0, 1])
@pytest.mark.parametrize("told", [(), (0,), (0, 1)])
def test_a_failure_of_one_is_raised_on_all(rank: int, unlucky: int, told: tuple[int, ...], tmp_path: Path) -> None:
    kept = make_kept(tmp_path)
    with full_disk(rank == unlucky):
        saving = kept.save_state(async_save=True)
        assert kept.keeper._saves.has_failed()
    expected: Any = (OSError, RuntimeError)
    if rank in told:
        with pytest.raises(expected, match="No space left on device"):
            saving.result()
    if told != (0, 1):
        with pytest.raises(expected, match="No space left on device") as caught:
            kept.save_state(async_save=True)
        if rank not in told:
            assert isinstance(caught.value, OSError if rank == unlucky else RuntimeError)
            assert "checkpoint_0, which save_state(async_save=True) had begun" in caught.value.__notes__[0]
    dist.barrier()
    assert os.listdir(tmp_path / "checkpoints") == []
    assert kept.save_state(async_save=True).result().name == "checkpoint_0"
    dist.barrier()
    kept.load_state()


@ranks(2)
def test_a_state_that_cannot_be_copied_on_one_is_an_error_on_all_at_once(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    if rank == 0:  # which alone writes it
        kept._custom_objects.append(Counter(object()))
    with pytest.raises((TypeError, RuntimeError), match="registered object 1"):
        kept.save_state(tmp_path / "state", async_save=True)
    dist.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_many_saves_follow_each_other(rank: int, tmp_path: Path) -> None:
    kept = make_kept(tmp_path, total_limit=2)
    for value in range(6):
        kept.fill(value)
        kept.save_state(async_save=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # while the threads agree
        assert tensor.item() == 2
    kept.fill(7.0)
    kept.keeper.finish()
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_4", "checkpoint_5"]
    kept.load_state()
    assert kept.values() == {5.0}


@ranks(2)
def test_each_machine_keeps_its_own_file_system(rank: int, tmp_path: Path) -> None:
    state = PartialState()
    state.local_process_index = 0  # two machines, which see different folders
    kept = make_kept()
    kept.project_configuration.save_on_each_node = True
    kept.fill(3.0)
    folder = tmp_path / str(rank) / "state"
    saving = kept.save_state(folder, async_save=True)
    kept.fill(4.0)
    saving.result()
    manifest = Manifest.read(folder)
    assert manifest is not None
    assert sorted(manifest.files) == sorted(contents(folder))
    assert {"model.safetensors", f"random_states_{rank}.pkl"} <= set(manifest.files)
    dist.barrier()
    kept.load_state(folder)
    assert kept.values() == {3.0}


@ranks(2)
def test_the_main_process_alone_and_one_that_comes_later(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 0.0)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 4))
    wanted = [parameter.tolist() for parameter in model.parameters()]
    store = dist.distributed_c10d._get_default_store()
    warnings.simplefilter("ignore", UserWarning)
    if rank == 1:
        store.wait(["saved"])
    saving = accelerator.save_state(tmp_path / "state", async_save=True)
    if rank == 0:
        store.set("saved", "1")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert saving.result() == tmp_path / "state"
    dist.barrier()
    assert sorted(contents(tmp_path / "state")) == ["model.safetensors", "random_states_0.pkl", "random_states_1.pkl"]
    accelerator.load_state(saving)
    assert [parameter.tolist() for parameter in model.parameters()] == wanted


@ranks(2)
@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_shards_are_written_as_they_were(
    rank: int, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form)
    )
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def train() -> None:
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    train()
    wanted = [value.full_tensor().clone() for value in model.state_dict().values()]
    held = HeldWriter(monkeypatch)
    accelerator.save_state(tmp_path / "at once")
    saving = accelerator.save_state(tmp_path / "later", async_save=True)
    train()
    held.release()
    saving.result()
    dist.barrier()
    at_once, later = contents(tmp_path / "at once"), contents(tmp_path / "later")
    assert sorted(at_once) == sorted(later)
    assert [name for name in at_once if at_once[name] != later[name] and not name.endswith(".metadata")] == []
    manifest = Manifest.read(tmp_path / "later")
    assert manifest is not None
    assert sorted(manifest.files) == sorted(later)
    accelerator.load_state(saving)
    assert all(map(torch.equal, [value.full_tensor() for value in model.state_dict().values()], wanted))


@ranks(2)
@pytest.mark.parametrize("unlucky", [0, 1])
def test_shards_that_one_cannot_write_fail_on_all(
    rank: int, unlucky: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    accelerator.prepare(nn.Linear(4, 4))
    if rank == unlucky:
        monkeypatch.setattr(FileSystem, "create_stream", full)
    saving = accelerator.save_state(tmp_path / "state", async_save=True)
    with pytest.raises(OSError if rank == unlucky else RuntimeError, match="No space left on device"):
        saving.result()
    dist.barrier()
    assert os.listdir(tmp_path) == []


ENGINES_OF_TWO = [
    name
    for name, engine in ENGINES.items()
    if engine.world == 2 and name not in ("ddp", "fsdp2-sharded", "fsdp2-full")
    if find_spec("deepspeed") or not name.startswith("zero")
]


@pytest.mark.sample(4)
@ranks(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENGINES_OF_TWO)
def test_every_engine_saves_what_was_there(
    rank: int, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with run_of(name, ENGINES[name].num_groups[0]) as run:
        run.train(2)
        held = HeldWriter(monkeypatch)
        run.accelerator.save_state(tmp_path / "at once")
        saving = run.accelerator.save_state(tmp_path / "later", async_save=True)
        wanted = run.train(2)  # while nothing is published
        dist.barrier()
        assert not (tmp_path / "later").exists()
        held.release()
        saving.result()
        dist.barrier()
    at_once, later = contents(tmp_path / "at once"), contents(tmp_path / "later")
    assert sorted(at_once) == sorted(later)
    with run_of(name, ENGINES[name].num_groups[0], seed=1) as run:
        run.accelerator.load_state(tmp_path / "later")
        run.step = 2
        assert run.train(2) == wanted
