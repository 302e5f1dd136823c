"""Checkpoints of sharded training are loaded by other numbers of processes, other engines and other forms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from tests.parity.test_fsdp import ADAMW, BATCH_SIZE, assert_same, fsdp, prepare, train
from tests.support.ranks import POOL
from tests.support.tiny_transformer import reference_curve

HALF, ALL = 16, 24


def body(function: Any) -> Any:
    """What runs in every process of a pool."""
    function.body = function
    return function


@body
def save(rank: int, world: int, folder: str, version: int, form: str) -> None:
    plugin = fsdp(version, state_dict_type=form) if version else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    parts = prepare(accelerator)
    train(accelerator, *parts, steps=HALF)
    accelerator.save_state(folder)


@body
def resume(rank: int, world: int, folder: str, version: int, form: str, expected: list[float]) -> None:
    plugin = fsdp(version, state_dict_type=form) if version else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another number of processes, and a plugin without effect
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        parts = prepare(accelerator, seed=1)
        accelerator.load_state(folder)
    assert_same(train(accelerator, *parts, steps=ALL - HALF), expected)


def run(body: Any, world: int, **values: Any) -> None:
    POOL.run(body, world, values, 120)


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
CASES = [  # saved by how many processes, with which version (0 is without sharding); loaded by and with
    (SHARDED, 2, 2, 1, 2),
    (SHARDED, 1, 2, 2, 2),
    (SHARDED, 2, 2, 4, 2),
    (SHARDED, 2, 1, 4, 1),
    (SHARDED, 2, 2, 2, 1),
    (SHARDED, 2, 2, 2, 0),
    (SHARDED, 2, 0, 4, 2),
    (FULL, 2, 2, 4, 2),
    (FULL, 2, 1, 1, 2),
    (FULL, 2, 2, 2, 0),
]


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize(("form", "saved_by", "version", "loaded_by", "other_version"), CASES)
def test_goes_on_elsewhere(
    tmp_path: Path, form: str, saved_by: int, version: int, loaded_by: int, other_version: int
) -> None:
    expected = reference_curve(ALL, BATCH_SIZE, ADAMW)[HALF:]
    folder = str(tmp_path / "state")
    run(save, saved_by, folder=folder, version=version, form=form)
    run(resume, loaded_by, folder=folder, version=other_version, form=form, expected=expected)


@pytest.mark.takes_turns
def test_all_differences_are_listed(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    run(save, 2, folder=folder, version=2, form="SHARDED_STATE_DICT")
    run(refused, 2, folder=folder)


@body
def refused(rank: int, world: int, folder: str) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(2))
    model, _, _ = prepare(accelerator, width=32, layers=1)
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"'embedding.weight' is \(32, 16\), the model has \(32, 32\)") as caught:
        accelerator.load_state(folder)
    assert "'blocks.1.mlp.up.weight' is not in the model" in str(caught.value)
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.takes_turns
def test_weights_merge_into_a_model_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from accelerate.utils import merge_fsdp_weights

    folder = tmp_path / "state"
    run(save, 2, folder=str(folder), version=2, form="SHARDED_STATE_DICT")
    merge_fsdp_weights(folder / "pytorch_model_fsdp_0", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    run(holds, 2, folder=str(folder), merged=merged)


@body
def holds(rank: int, world: int, folder: str, merged: dict[str, torch.Tensor]) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(2))
    model, _, _ = prepare(accelerator, seed=3)
    accelerator.load_state(folder)
    state = accelerator.get_state_dict(model)
    assert set(state) == (set(merged) if rank == 0 else set())
    assert all(torch.equal(value, merged[name]) for name, value in state.items())


@pytest.mark.takes_turns
@pytest.mark.parametrize("version", [1])
def test_local_form_is_read_by_as_many(tmp_path: Path, version: int) -> None:
    expected = reference_curve(ALL, BATCH_SIZE, ADAMW)[HALF:]
    folder = str(tmp_path / "state")
    run(save, 2, folder=folder, version=version, form="LOCAL_STATE_DICT")
    run(resume, 2, folder=folder, version=version, form="LOCAL_STATE_DICT", expected=expected)
