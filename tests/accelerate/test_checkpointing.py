"""The old path of writing and reading training states by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from tests.support.keeping import Counter, make_kept
from tests.support.ranks import ranks


@pytest.mark.parametrize("safe_serialization", [True, False])
def test_a_state_comes_back(tmp_path: Path, safe_serialization: bool) -> None:
    kept = make_kept()
    kept.fill(3.0)
    folder = save_accelerator_state(
        tmp_path / "state",
        [model.state_dict() for model in kept._models],
        kept._optimizers,
        kept._schedulers,
        [],
        0,
        7,
        scaler=torch.amp.GradScaler("cpu"),
        safe_serialization=safe_serialization,
    )
    assert folder == tmp_path / "state"
    weights = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    assert sorted(os.listdir(folder)) == sorted(
        [weights, "optimizer.bin", "random_states_0.pkl", "scaler.pt", "scheduler.bin"]
    )
    kept.fill(4.0)
    overrides = load_accelerator_state(
        folder, kept._models, kept._optimizers, kept._schedulers, [], 0, torch.amp.GradScaler("cpu"), "cpu"
    )
    assert overrides == {"step": 7}
    kept.step, kept._custom_objects = 3, []
    assert kept.values() == {3.0}


def test_places_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="map_location='cuda'"):
        load_accelerator_state(tmp_path, [], [], [], [], 0, map_location="cuda")


def test_an_object_of_ones_own_comes_back(tmp_path: Path) -> None:
    save_custom_state(Counter({"a": [1, 2]}), tmp_path / "state", 3)
    assert os.listdir(tmp_path / "state") == ["custom_checkpoint_3.pkl"]
    counter = Counter()
    load_custom_state(counter, tmp_path / "state", 3)
    assert counter.count == {"a": [1, 2]}
    with pytest.raises(TypeError, match="registered object 0"):
        save_custom_state(Counter(object()), tmp_path / "state")
    with pytest.raises(FileNotFoundError):
        load_custom_state(counter, tmp_path / "state", 4)


@ranks(2)
def test_only_the_first_process_writes_what_there_is_one_of(rank: int, tmp_path: Path) -> None:
    kept = make_kept()
    save_accelerator_state(tmp_path / f"state{rank}", [kept._models[0].state_dict()], [], [], [], rank, 0)
    save_custom_state(Counter(), tmp_path / f"state{rank}")
    own = [f"random_states_{rank}.pkl"]
    shared = ["custom_checkpoint_0.pkl", "model.safetensors"] if rank == 0 else []
    assert sorted(os.listdir(tmp_path / f"state{rank}")) == sorted([*shared, *own])
