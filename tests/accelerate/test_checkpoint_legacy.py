"""Checkpoints of accelerate 1.15, which have no manifest, load; what is none of them is recognised."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.checkpoint.reading import Checkpoint, Receivers, read_state
from tests.support.keeping import Counter, Kept, make_kept


def write_legacy(kept: Kept, folder: Path, *, safe: bool = True, num_processes: int = 1) -> None:
    """The files that accelerate 1.15 writes for what is kept."""
    folder.mkdir()
    weights = kept._models[0].state_dict()
    if safe:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(weights, folder / "pytorch_model.bin")
    torch.save(kept._optimizers[0].state_dict(), folder / "optimizer.bin")
    torch.save(kept._schedulers[0].state_dict(), folder / "scheduler.bin")
    torch.save(kept._custom_objects[0].state_dict(), folder / "custom_checkpoint_0.pkl")
    for rank in range(num_processes):
        states = {
            "step": kept.step,
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        torch.save(states, folder / f"random_states_{rank}.pkl")


@pytest.mark.parametrize("safe", [True, False])
def test_a_legacy_checkpoint_loads(tmp_path: Path, safe: bool) -> None:
    kept = make_kept()
    loss = kept._models[0](torch.ones(3)).sum()
    loss.backward()
    kept._optimizers[0].step()
    kept.fill(3.0)
    moments = kept._optimizers[0].state_dict()["state"][0]["exp_avg"].clone()
    write_legacy(kept, tmp_path / "state", safe=safe)
    wanted = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    other = make_kept()
    other.load_state(tmp_path / "state")
    assert other.values() == {3.0}
    assert torch.equal(other._optimizers[0].state_dict()["state"][0]["exp_avg"], moments)
    assert [random.random(), float(np.random.rand()), float(torch.rand(1))] == wanted


def test_a_run_goes_on_after_legacy_checkpoints(tmp_path: Path) -> None:
    kept = make_kept()
    (tmp_path / "checkpoints").mkdir()
    for value in (0, 1):
        kept.fill(value)
        write_legacy(kept, tmp_path / "checkpoints" / f"checkpoint_{value}")
    resumed = make_kept(tmp_path, total_limit=2)
    resumed.load_state()
    assert resumed.values() == {1.0}
    assert resumed.save_state().name == "checkpoint_2"


def test_the_newest_legacy_checkpoint_that_is_not_cut_is_loaded(tmp_path: Path) -> None:
    kept = make_kept()
    (tmp_path / "checkpoints").mkdir()
    for value in (0, 1):
        kept.fill(value)
        write_legacy(kept, tmp_path / "checkpoints" / f"checkpoint_{value}")
    cut = tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-4])
    with pytest.warns(UserWarning, match=r"'model\.safetensors' has \d+ bytes, its header says \d+"):
        (resumed := make_kept(tmp_path)).load_state()
    assert resumed.values() == {0.0}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_legacy_file_is_named(tmp_path: Path, name: str, share: float) -> None:
    write_legacy(make_kept(), tmp_path / "state")
    path = tmp_path / "state" / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match=f"not complete: '{name}'"):
        make_kept().load_state(tmp_path / "state")


def test_a_legacy_folder_is_overwritten_in_place(tmp_path: Path) -> None:
    kept = make_kept()
    write_legacy(kept, tmp_path / "state", num_processes=2)
    (tmp_path / "state" / "notes.txt").write_text("theirs")
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "notes.txt").exists()
    kept.fill(4.0)
    kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


def test_other_numbers_of_processes(tmp_path: Path) -> None:
    write_legacy(make_kept(), tmp_path / "state", num_processes=2)
    with pytest.warns(
        UserWarning,
        match="num_processes=2 and is loaded with num_processes=1: the RNG states of process 1 are not used",
    ):
        make_kept().load_state(tmp_path / "state")


def test_the_step_is_taken_from_another_process_where_there_is_none_of_this_one(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    write_legacy(kept, tmp_path / "state")
    kept.fill(4.0)
    state = read_state(Checkpoint.open(tmp_path / "state"), Receivers(custom=kept._custom_objects), process_index=1)
    assert state.step == 3
    assert state.random_states is None


class SeedableRandomSampler:
    """Stands for the sampler object that accelerate 1.15 pickles."""

    epoch = 3


def test_a_pickled_sampler_is_left_out_with_a_warning(tmp_path: Path) -> None:
    kept = make_kept()
    kept._dataloaders = [object()]
    write_legacy(kept, tmp_path / "state")
    torch.save(SeedableRandomSampler(), tmp_path / "state" / "sampler.bin")
    with pytest.warns(UserWarning, match=r"'sampler\.bin' .* holds a pickled sampler object"):
        kept.load_state(tmp_path / "state")


def test_a_class_in_a_custom_object_must_be_trusted(tmp_path: Path) -> None:
    kept = make_kept()
    kept._custom_objects = [Counter(SeedableRandomSampler())]
    write_legacy(kept, tmp_path / "state")
    with pytest.raises(ValueError, match=r"custom_checkpoint_0\.pkl .*SeedableRandomSampler.*add_safe_globals"):
        kept.load_state(tmp_path / "state")
    with torch.serialization.safe_globals([SeedableRandomSampler]):
        kept.load_state(tmp_path / "state")
    assert kept._custom_objects[0].count.epoch == 3


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("latest_checkpointed_iteration.txt", "Megatron-LM"),
    ],
)
def test_checkpoints_of_other_engines_are_recognised(tmp_path: Path, name: str, engine: str) -> None:
    write_legacy(make_kept(), tmp_path / "state")
    (tmp_path / "state" / name).touch()
    with pytest.raises(ValueError, match=f"a checkpoint of {engine}, as '{name}' shows"):
        make_kept().load_state(tmp_path / "state")


def test_truncated_states_of_deepspeed_are_named(tmp_path: Path) -> None:
    write_legacy(make_kept(), tmp_path / "state")
    (tmp_path / "state" / "pytorch_model").mkdir()
    (tmp_path / "state" / "pytorch_model" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(ValueError, match=r"mp_rank_00_model_states\.pt cannot be loaded"):
        make_kept().load_state(tmp_path / "state")


def test_a_folder_of_something_else_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"is not a checkpoint: it holds 'config\.json' instead"):
        make_kept().load_state(tmp_path)


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl", "pytorch_model.bin"])
def test_a_file_with_something_else_inside_is_recognised(tmp_path: Path, name: str) -> None:
    write_legacy(make_kept(), tmp_path / "state", safe=False)
    torch.save([1, 2], tmp_path / "state" / name)
    kept = make_kept()
    kept.fill(3.0)
    with pytest.raises(ValueError, match=f"{name} holds a list instead of"):
        kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


def test_files_of_old_torch_versions_load(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    write_legacy(kept, tmp_path / "state", safe=False)
    old: Any = {"_use_new_zipfile_serialization": False}
    torch.save(kept._optimizers[0].state_dict(), tmp_path / "state" / "optimizer.bin", **old)
    torch.save(kept._models[0].state_dict(), tmp_path / "state" / "pytorch_model.bin", **old)
    kept.fill(4.0)
    kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


def test_a_plain_model_is_all_that_is_needed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = Kept([nn.Linear(2, 2)])
    other.load_state(tmp_path)
    assert torch.equal(other._models[0].weight, model.weight)
