"""The last checkpoint with finite weights stays, whatever `total_limit` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_integrations.finite import has_finite_weights
from accel_ops.modules import to_local
from accelerate import Accelerator
from accelerate.checkpoint.naming import remove_oldest
from accelerate.utils import ProjectConfiguration
from tests.support.changed_engines import ENGINES
from tests.support.leaks import reset_state
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_model

LIMIT = 2


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint_")) for path in (folder / "checkpoints").glob("checkpoint_*"))


def is_noted_finite(folder: Path, number: int) -> bool:
    return bool(json.loads((folder / "checkpoints" / f"checkpoint_{number}" / "manifest.json").read_text())["finite"])


def check_rotation(engine: str, folder: Path, *, in_background: bool = False) -> None:
    """Weights are NaN on the last rank alone from the third of six checkpoints on, and finite again in the last two."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=LIMIT)
    accelerator = Accelerator(cpu=True, project_config=project, **ENGINES[engine].settings())
    model = accelerator.prepare(make_model(tied=True, layers=2))
    held = [to_local(weight.detach()) for weight in model.parameters()]
    element = next(one for one in held if one.numel()).view(-1)[:1]
    is_last = accelerator.process_index == accelerator.num_processes - 1
    expected = [[0], [0, 1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 4, 5], [5, 6], [6, 7]]
    for number, left in enumerate(expected):
        is_bad = 2 <= number < 6
        if is_last:
            element.fill_(float("nan") if is_bad else 0.5)
        saving = accelerator.save_state(async_save=in_background)
        if is_last:
            element.fill_(0.5 if is_bad else float("nan"))  # what a save in the background must not notice
        if in_background:
            saving.result()
        accelerator.wait_for_everyone()
        assert is_noted_finite(folder, number) is not is_bad
        accelerator.wait_for_everyone()
        assert kept(folder) == left
        accelerator.wait_for_everyone()
    accelerator.free_memory()
    reset_state()


def test_one_process(tmp_path: Path) -> None:
    check_rotation("single", tmp_path / "now")
    check_rotation("single", tmp_path / "later", in_background=True)


@ranks(2)
def test_two_processes(rank: int, world: int, tmp_path: Path) -> None:
    for engine in ("ddp", "fsdp1-sharded", "fsdp1-flat-full", "fsdp2-full", "tp"):
        check_rotation(engine, tmp_path / engine)
    for engine in ("ddp", "fsdp2-sharded"):
        check_rotation(engine, tmp_path / f"{engine}-later", in_background=True)


def test_checkpoints_without_the_note_count_as_finite(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for number, finite in enumerate((None, None, False, False)):
        path = folder / f"checkpoint_{number}"
        path.mkdir(parents=True)
        content = {"format": 1, "files": {}, "world_size": 1, "step": 0, "iteration": number, "versions": {}}
        text = json.dumps(content if finite is None else content | {"finite": finite})
        (path / "manifest.json").write_text(text)
    (folder / "checkpoint_0" / "manifest.json").unlink()  # of accelerate 1.15
    assert [path.name for path in remove_oldest(folder / "checkpoint_3", 1)] == ["checkpoint_0", "checkpoint_2"]
    (folder / "checkpoint_1" / "manifest.json").write_text("{")  # which does not load
    assert [path.name for path in remove_oldest(folder / "checkpoint_3", 1)] == ["checkpoint_1"]


@pytest.mark.parametrize(
    ("kind", "value", "finite"),
    [
        ("weight", float("nan"), False),
        ("weight", float("inf"), False),
        ("weight", 1e30, True),  # whose square overflows
        ("buffer", float("nan"), False),
        ("buffer", float("-inf"), True),  # a mask
        ("not stored", float("nan"), True),
    ],
)
def test_which_weights_are_finite(kind: str, value: float, finite: bool) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_parameter("short", nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    model.register_parameter("absent", nn.Parameter(torch.ones(2, device="meta")))
    model.register_buffer("codes", torch.zeros(2, dtype=torch.float8_e4m3fn))
    assert has_finite_weights(model)
    tensor = {"weight": model.weight.detach(), "buffer": model.mask, "not stored": model.cache}[kind]
    tensor[0] = value
    assert has_finite_weights(model) is finite
