"""Saving on some ranks only: the main process saves what it holds, and nobody hangs."""

from __future__ import annotations

import errno
import json
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_ops.collectives import participants
from accelerate import Accelerator, model_folder
from accelerate.utils import ProjectConfiguration
from tests.support.keeping import make_kept
from tests.support.ranks import ranks


def trained(config: ProjectConfiguration | None = None) -> tuple[Accelerator, Callable[[], None]]:
    """An accelerator with a prepared model, and what takes a step on all ranks."""
    accelerator = Accelerator(cpu=True, project_config=config)
    model = torch.nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    return accelerator, step


def wait_until(exists: Path) -> None:
    """Wait for a file of another rank, without a collective."""
    while not exists.exists():
        time.sleep(0.002)


def full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def own_weights(accelerator: Accelerator) -> list[float]:
    (model,) = accelerator._models
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@ranks(2)
def test_the_main_process_saves_alone_and_training_goes_on(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 0.2)
    accelerator, step = trained()
    saved = own_weights(accelerator)
    for name in ("a", "b"):
        if accelerator.is_main_process:
            if name == "a":
                with pytest.warns(
                    UserWarning, match="on the main process without the others.*Call save_state.. on all processes"
                ):
                    accelerator.save_state(tmp_path / name)
            else:
                accelerator.save_state(tmp_path / name)  # said once
            assert sorted(os.listdir(tmp_path / name)) == [
                "manifest.json",
                "model.safetensors",
                "optimizer.bin",
                "random_states_0.pkl",
            ]
        step()
    assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]  # collectives still pair up
    accelerator.save_state(tmp_path / "all")
    assert "random_states_1.pkl" in os.listdir(tmp_path / "all")
    assert not json.loads((tmp_path / "all" / "manifest.json").read_bytes())["absent"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_state(tmp_path / "a")
    assert own_weights(accelerator) == saved
    said = [str(warning.message) for warning in caught if "by the main process alone" in str(warning.message)]
    assert len(said) == (1 if rank == 0 else 0)


@ranks(2)
def test_after_a_call_that_was_made_alone_the_next_waits_a_moment(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, step = trained()
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 0.2)
    warnings.simplefilter("ignore", UserWarning)
    for number in range(3):
        if accelerator.is_main_process:
            accelerator.save_state(tmp_path / str(number))
            monkeypatch.setattr(participants, "PATIENCE_SECONDS", 1e6)  # which it would wait if it had not learned
        step()


@ranks(2)
def test_a_rank_that_comes_late_adds_its_random_states(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 0.0)
    accelerator, step = trained()
    random.seed(rank)
    if rank == 1:
        wait_until(tmp_path / "state" / "manifest.json")
        accelerator.save_state(tmp_path / "state")
    else:
        with pytest.warns(UserWarning, match="without the others"):
            accelerator.save_state(tmp_path / "state")
    wanted = random.random()
    monkeypatch.undo()
    step()
    accelerator.wait_for_everyone()
    random.seed(7)
    accelerator.load_state(tmp_path / "state")  # says nothing: nothing is missing
    assert random.random() == wanted
    accelerator.save_state(tmp_path / "state")  # the added file is part of what is replaced
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".state")) == []
    dist.barrier()


@ranks(2)
def test_what_was_added_to_an_earlier_checkpoint_of_the_folder_does_not_count(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 0.0)
    accelerator, step = trained()
    if rank == 1:
        wait_until(tmp_path / "state" / "manifest.json")
        accelerator.save_state(tmp_path / "state")
        added = (tmp_path / "state" / "random_states_1.pkl").read_bytes()
    else:
        with pytest.warns(UserWarning, match="without the others"):
            accelerator.save_state(tmp_path / "state")
    step()
    if rank == 0:
        accelerator.save_state(tmp_path / "state")
        assert "random_states_1.pkl" not in os.listdir(tmp_path / "state")
    accelerator.wait_for_everyone()
    if rank == 1:
        (tmp_path / "state" / "random_states_1.pkl").write_bytes(added)
    accelerator.wait_for_everyone()
    random.seed(7)
    state = random.getstate()
    if rank == 0:
        with pytest.warns(UserWarning, match="no RNG states for processes 1"):
            accelerator.load_state(tmp_path / "state")
    else:
        accelerator.load_state(tmp_path / "state")
        assert random.getstate() == state


@ranks(2)
def test_a_rank_that_waits_for_everyone_is_not_waited_for(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 1e6)
    accelerator, step = trained()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with pytest.warns(UserWarning, match="without the others"):
            accelerator.save_state(tmp_path / "state")
    accelerator.wait_for_everyone()
    step()
    assert (tmp_path / "state" / "manifest.json").is_file()


@ranks(2)
def test_a_save_without_the_main_process_is_an_error(rank: int, tmp_path: Path) -> None:
    accelerator, step = trained()
    if not accelerator.is_main_process:
        with pytest.raises(
            RuntimeError, match="save_state.. was called on process 1, but the main process did not call"
        ):
            accelerator.save_state(tmp_path / "state")
        with pytest.raises(RuntimeError, match="save_model.. was called on process 1"):
            accelerator.save_model(accelerator._models[0], tmp_path / "model")
    accelerator.wait_for_everyone()
    step()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_where_states_are_sharded_a_save_on_one_rank_is_an_error(rank: int, tmp_path: Path) -> None:
    Accelerator(cpu=True)
    kept = make_kept()
    assert not kept.engine.is_replicated
    if rank == 0:
        with pytest.raises(
            RuntimeError, match="save_state.. needs all processes, but some .* did not call it.*a shard"
        ):
            kept.save_state(tmp_path / "state")
        with pytest.raises(RuntimeError, match="save_model.. needs all processes"):
            kept.save_model(kept._models[0], tmp_path / "model")
    Accelerator(cpu=True).wait_for_everyone()
    assert os.listdir(tmp_path) == []
    kept.save_state(tmp_path / "state")
    assert "random_states_1.pkl" in os.listdir(tmp_path / "state")


@ranks(2)
def test_models_are_saved_by_the_main_process_alone_or_on_all(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, step = trained()
    (model,) = accelerator._models
    if accelerator.is_main_process:
        accelerator.save_model(model, tmp_path / "alone")
        accelerator.save_model(model, tmp_path / "again")
        assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}
        assert os.listdir(tmp_path / "alone") == ["model.safetensors"]
    step()
    accelerator.save_model(model, tmp_path / "all")
    assert os.listdir(tmp_path / "all") == ["model.safetensors"]  # on every rank, as soon as the call returns
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "write_model_folder", full_disk)  # which is asked on the main process only
        with pytest.raises(OSError if rank == 0 else RuntimeError, match="No space left"):
            accelerator.save_model(model, tmp_path / "full")
    step()


@ranks(2)
def test_automatic_names_stay_the_same_on_all_ranks(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 0.0)
    warnings.simplefilter("ignore", UserWarning)
    accelerator, step = trained(ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True))
    for _ in range(2):
        if accelerator.is_main_process:
            accelerator.save_state()
        step()
    monkeypatch.undo()
    assert accelerator.save_state() == tmp_path / "checkpoints" / "checkpoint_2"
    assert accelerator.save_iteration == 3


@pytest.mark.thorough
@ranks(3)
def test_once_some_have_come_all_are_waited_for(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 0.5)
    accelerator, _ = trained()
    if rank == 2:
        time.sleep(1.0)  # later than the main process would wait for nobody
    accelerator.save_state(tmp_path / "state")
    manifest = json.loads((tmp_path / "state" / "manifest.json").read_bytes())
    assert not manifest["absent"]
    assert "random_states_2.pkl" in manifest["files"]


@ranks(2)
def test_a_rank_that_has_left_is_not_waited_for(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participants, "PATIENCE_SECONDS", 1e6)
    accelerator, _ = trained()
    if rank == 0:
        with pytest.warns(UserWarning, match="without the others"):
            accelerator.save_state(tmp_path / "state")
        accelerator.end_training()
        accelerator.save_model(accelerator._models[0], tmp_path / "model")  # nobody can be asked any more
        accelerator.save_state(tmp_path / "after")
        assert sorted(os.listdir(tmp_path)) == ["after", "model", "state"]
    else:
        accelerator.end_training()
        accelerator.save_state(tmp_path / "after")  # likewise: it has nothing to add
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool waits in one
