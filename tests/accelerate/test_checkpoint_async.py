"""Checkpoints that are written while training goes on, in one process."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel_integrations.training_state.snapshot import CHUNK_BYTES, HostBuffers
from accel_ops.files import durable
from accelerate import Accelerator
from accelerate.checkpoint.background import BackgroundSave
from tests.support.held_writer import HeldWriter
from tests.support.keeping import Counter, Kept, make_kept
from tests.support.short_run import values_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldWriter:
    return HeldWriter(monkeypatch)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint; of the manifest what does not depend on the time."""
    actual = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads(actual.pop("manifest.json"))
    del manifest["writer"]
    return {**actual, "manifest.json": json.dumps(manifest).encode()}


class Anything:
    """An object registered for checkpoints, with all that a state may consist of."""

    def __init__(self) -> None:
        values = torch.arange(12.0)
        self.state: dict[Any, Any] = {
            "values": values,
            "view": values[2:5],
            "transposed": torch.arange(6.0).view(2, 3).t(),
            "again": values,
            "scalar": torch.tensor(3),
            "empty": torch.empty(0),
            "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "numbers": np.arange(5),
            "nested": [1, (2.0, {"deep": [torch.ones(3, dtype=torch.bfloat16)]}), "text", {4, 5}],
        }
        self.state["itself"] = [self.state["nested"], self.state["nested"]]

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state

    def go_on(self) -> None:
        self.state["values"] += 1
        self.state["transposed"] *= 2
        self.state["scalar"] += 1
        self.state["parameter"].data.add_(1)
        self.state["numbers"] += 1
        self.state["nested"][1][1]["deep"][0].add_(1)
        self.state["nested"].append("more")


def make_rich() -> Kept:
    """A training state with tied weights, buffers, moments and an accumulation window."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    kept = Kept(
        [model], [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)], _custom_objects=[Counter(), Anything()]
    )
    kept.engine.accumulates_in_grad = True
    kept.engine.averaging = SimpleNamespace(state_dict=dict)
    kept.engine.gradient_state._set_sync_gradients(False)
    train(kept)
    return kept


def train(kept: Kept) -> None:
    """Change everything that a checkpoint holds, most of it in place."""
    kept._models[0](torch.randn(8, 4)).square().mean().backward()
    kept._optimizers[0].step()
    kept._schedulers[0].step()
    kept._custom_objects[0].count += 1
    kept._custom_objects[1].go_on()
    kept.step += 1


# ---- what is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
def test_a_run_that_goes_on_leaves_the_files_as_they_were(safe: bool, held: HeldWriter, tmp_path: Path) -> None:
    kept = make_rich()
    folder = tmp_path / "state"
    kept.save_state(folder, safe)
    wanted = contents(folder)
    kept.project_configuration.iteration = 0
    saving = kept.save_state(folder, safe, async_save=True)
    for _ in range(3):
        train(kept)
    held.release()
    assert saving.result() == folder
    actual = contents(folder)
    assert sorted(actual) == sorted(wanted)
    assert [name for name in wanted if actual[name] != wanted[name]] == []


def test_what_hooks_write_and_leave_out_counts(held: HeldWriter, tmp_path: Path) -> None:
    def hook(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        Path(folder, "adapter.txt").write_text("mine")
        weights.clear()

    kept = make_kept()
    kept.keeper.register_save_state_pre_hook(hook)
    saving = kept.save_state(tmp_path / "state", async_save=True)
    held.release()
    actual = contents(saving.result())
    assert actual["adapter.txt"] == b"mine"
    assert "model.safetensors" not in actual
    assert "adapter.txt" in json.loads(actual["manifest.json"])["files"]


def test_old_checkpoints_go_when_the_new_one_is_there(held: HeldWriter, tmp_path: Path) -> None:
    kept = make_kept(tmp_path, total_limit=1)
    kept.save_state()
    saving = kept.save_state(async_save=True)
    assert [path.name for path in (tmp_path / "checkpoints").glob("checkpoint*")] == ["checkpoint_0"]
    held.release()
    saving.result()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_1"]
    assert kept.project_configuration.iteration == 2


def test_a_state_that_would_not_load_is_an_error_at_once(tmp_path: Path) -> None:
    kept = make_kept()
    kept._custom_objects.append(Counter(object()))
    with pytest.raises(TypeError, match="registered object 1"):
        kept.save_state(tmp_path / "state", async_save=True)
    assert os.listdir(tmp_path) == []


# ---- the handle --------------------------------------------------------------------------------------------------


def test_the_handle_stands_for_the_folder(held: HeldWriter, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    saving = make_kept().save_state(folder, async_save=True)
    assert isinstance(saving, BackgroundSave)
    assert not saving.done()
    assert not folder.exists()
    with pytest.raises(TimeoutError, match="state was not complete within 0 s"):
        saving.result(timeout=0)
    assert (saving.folder, Path(saving), str(saving), saving / "model.safetensors") == (
        folder, folder, str(folder), folder / "model.safetensors",
    )  # fmt: skip
    held.release()
    assert saving.result() == folder
    assert saving.done()
    assert folder.is_dir()


def test_a_keeper_with_a_background_save_can_be_pickled() -> None:
    kept = make_kept()
    assert pickle.loads(pickle.dumps(kept.keeper._saves)).has_failed() is False


# ---- one after the other -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["save", "async save", "load", "finish"])
def test_what_comes_next_waits(action: str, held: HeldWriter, tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    first = kept.save_state(tmp_path / "first", async_save=True)
    kept.fill(4.0)
    held.release_when_awaited()
    actions: dict[str, Callable[[], Any]] = {
        "save": lambda: kept.save_state(tmp_path / "second"),
        "async save": lambda: kept.save_state(tmp_path / "second", async_save=True),
        "load": lambda: kept.load_state(first),
        "finish": kept.keeper.finish,
    }
    ended = actions[action]()
    assert first.done()
    if action == "async save":
        assert ended.result() == tmp_path / "second"
    kept.load_state(tmp_path / "first")
    assert kept.values() == {3.0}


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The disk is full for whatever is not written from now on, after pytest's folder; the function makes room."""

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "write", full)
    return monkeypatch.undo


@pytest.mark.parametrize("action", ["save", "async save", "load", "finish", "result"])
def test_a_failure_is_raised_next_time_once(action: str, full_disk: Callable[[], None], tmp_path: Path) -> None:
    kept = make_kept(tmp_path)
    saving = kept.save_state(async_save=True)
    assert kept.project_configuration.iteration == 1
    kept.keeper._saves.has_failed()
    full_disk()
    actions: dict[str, Callable[[], Any]] = {
        "save": kept.save_state,
        "async save": lambda: kept.save_state(async_save=True),
        "load": kept.load_state,
        "finish": kept.keeper.finish,
        "result": saving.result,
    }
    with pytest.raises(OSError, match="No space left on device") as caught:
        actions[action]()
    assert "checkpoint_0, which save_state(async_save=True) had begun" in caught.value.__notes__[0]
    assert os.listdir(tmp_path / "checkpoints") == []
    assert kept.save_state().name == "checkpoint_0"
    kept.load_state()


def test_training_that_ends_raises_what_failed(full_disk: Callable[[], None], tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "state", async_save=True)
    accelerator._checkpoints._saves.has_failed()
    full_disk()
    with pytest.raises(OSError, match="No space left on device"):
        accelerator.end_training()
    assert os.listdir(tmp_path) == []


# ---- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_used_again() -> None:
    buffers, cpu = HostBuffers(), torch.device("cpu")

    def take(*sizes: int) -> list[int]:
        buffers.begin()
        taken = [buffers.take(size, cpu) for size in sizes]
        buffers.end()
        assert [storage.nbytes() for storage in taken] == list(sizes)
        return [storage.data_ptr() for storage in taken]

    first = take(100, CHUNK_BYTES + 1, 1, 0, 50)
    assert take(100, CHUNK_BYTES + 1, 1, 0, 50) == first
    assert len({*first[:3], first[4]}) == 4
    take(100)
    assert [len(chunks) for chunks in buffers._chunks.values()] == [1]  # what is not needed any more is freed


# ---- the end of the program --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """How programs of this run end that have just begun a checkpoint, all forked from one that has imported torch."""
    folder = tmp_path_factory.mktemp("endings")
    names = values_of(request, "ending")
    if any(item.name == "test_a_program_that_ends_says_what_failed" for item in request.session.items):
        names += ["fails", "fails and is told"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.ending_runs", str(folder), *names],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize(("ending", "code"), [("returns", 0), ("raises", 1), ("exits", 3)])
def test_a_program_that_ends_completes_its_checkpoint(ending: str, code: int, endings: Any) -> None:
    folder, actual = endings
    assert actual[ending]["code"] == code
    assert os.listdir(folder / ending) == ["state"]
    other = make_kept()
    other.load_state(folder / ending / "state")
    assert other.values() == {3.0}


@pytest.mark.takes_turns
def test_a_program_that_ends_says_what_failed(endings: Any) -> None:
    folder, actual = endings
    assert os.listdir(folder / "fails") == []
    assert "Exception in save_state" in actual["fails"]["stderr"]
    assert "No space left on device" in actual["fails"]["stderr"]
    assert "Exception in save_state" not in actual["fails and is told"]["stderr"]
