"""Saving and loading a training state in one process."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel_ops.files import durable
from accel_ops.files.serialization import load
from accelerate import Accelerator, dispatch_model, load_checkpoint_in_model
from accelerate.checkpoint import naming
from accelerate.checkpoint.manifest import Manifest
from accelerate.utils import load_state_dict
from tests.support.keeping import Counter, Kept, ScaledPrecision, make_kept

FILES = ["custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "scheduler.bin"]


class Thing:
    pass


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# ---- what is saved comes back -----------------------------------------------------------------------------------


def test_a_state_comes_back(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    assert kept.save_state(tmp_path / "state") == tmp_path / "state"
    assert files(tmp_path / "state") == sorted([*FILES, "manifest.json"])
    kept.fill(4.0)
    kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


def test_the_manifest_describes_every_file(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None
    assert sorted(manifest.files) == FILES
    assert (manifest.world_size, manifest.step, manifest.iteration) == (1, 3, 0)
    assert manifest.versions["torch"] == torch.__version__
    for name, record in manifest.files.items():
        assert record.size == (tmp_path / "state" / name).stat().st_size


def test_several_objects_of_a_kind_are_numbered(tmp_path: Path) -> None:
    one, two = make_kept(), make_kept()
    both = Kept(
        one._models + two._models,
        one._optimizers + two._optimizers,
        one._schedulers + two._schedulers,
        _custom_objects=[Counter(), Counter()],
    )
    both.fill(5.0)
    both.save_state(tmp_path / "state")
    stems = ["custom_checkpoint_1.pkl", "model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin"]
    assert files(tmp_path / "state") == sorted([*FILES, "manifest.json", *stems])
    both.fill(6.0)
    both.load_state(str(tmp_path / "state"))
    assert both.values() == {5.0}


def test_weights_as_torch_writes_them(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state", safe_serialization=False)
    assert "pytorch_model.bin" in files(tmp_path / "state")
    kept.fill(4.0)
    kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    kept = make_kept()
    kept.save_state(tmp_path / "state")
    wanted = draw()
    draw()
    kept.load_state(tmp_path / "state")
    assert draw() == wanted


def test_random_states_of_another_machine_are_left_out_with_a_warning(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    states = load(tmp_path / "state" / "random_states_0.pkl")
    torch.save({**states, "torch_manual_seed": torch.zeros(3)}, tmp_path / "state" / "random_states_0.pkl")
    (tmp_path / "state" / "manifest.json").unlink()
    kept.fill(4.0)
    with pytest.warns(UserWarning, match="RNG states of the checkpoint were not restored"):
        kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


class Epochs:
    """A loader over data that shuffle by epoch."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.dataset = self

    def set_epoch(self, epoch: int) -> None:
        raise AssertionError("the loader does this when it begins")


def test_the_epoch_of_data_that_shuffle_by_it_is_kept(tmp_path: Path) -> None:
    kept = Kept(_dataloaders=[Epochs(3), object()])
    kept.save_state(tmp_path / "state")
    assert "sampler.bin" in files(tmp_path / "state")
    other = Kept(_dataloaders=[Epochs(0), object()])
    other.load_state(tmp_path / "state")
    assert other._dataloaders[0].iteration == 3


def test_the_loss_scale_is_kept(tmp_path: Path) -> None:
    kept = make_kept()
    kept.engine.precision = ScaledPrecision(torch.amp.GradScaler("cpu", init_scale=8.0))
    kept.engine.precision.scaler.scale(torch.ones(1))
    kept.save_state(tmp_path / "state")
    kept.engine.precision = ScaledPrecision(torch.amp.GradScaler("cpu", init_scale=2.0))
    kept.load_state(tmp_path / "state")
    assert kept.engine.precision.scaler.get_scale() == 8.0


def test_a_missing_loss_scale_is_said(tmp_path: Path) -> None:
    kept = make_kept()
    kept.save_state(tmp_path / "state")
    kept.engine.precision = ScaledPrecision(torch.amp.GradScaler("cpu", init_scale=2.0))
    with pytest.warns(UserWarning, match=r"no 'scaler\.pt'"):
        kept.load_state(tmp_path / "state")
    assert kept.engine.precision.scaler.get_scale() == 2.0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.register_buffer("strided", torch.randn(2, 3).t())


@pytest.mark.parametrize("safe_serialization", [True, False])
def test_tied_and_strided_weights_come_back(tmp_path: Path, safe_serialization: bool) -> None:
    kept = Kept([Tied()])
    wanted = {name: value.clone() for name, value in kept._models[0].state_dict().items()}
    kept.save_state(tmp_path / "state", safe_serialization)
    other = Kept([Tied()])
    other.load_state(tmp_path / "state")
    loaded = other._models[0].state_dict()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    assert other._models[0].last.weight is other._models[0].first.weight


def test_assigned_weights_do_not_live_in_the_file(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    kept.load_state(tmp_path / "state", assign=True)
    (tmp_path / "state" / "model.safetensors").write_bytes(b"\0" * 1000)
    assert kept.values() == {3.0}


def test_a_part_of_the_objects_may_be_loaded(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    part = Kept([nn.Linear(3, 2)], _custom_objects=[Counter()])
    part.load_state(tmp_path / "state")
    assert part.values() == {3.0}


# ---- names ------------------------------------------------------------------------------------------------------


def test_loading_before_prepare_is_said(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = accelerator.prepare(nn.Linear(3, 2))
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    del model
    accelerator.free_memory()
    with pytest.warns(
        UserWarning, match=r"holds a model, but none is prepared.*prepare\(model, optimizer, \.\.\.\) first"
    ):
        accelerator.load_state(tmp_path / "state")


def test_automatic_names_and_their_limit(tmp_path: Path) -> None:
    kept = make_kept(tmp_path, total_limit=2)
    for value in range(4):
        kept.fill(value)
        assert kept.save_state() == tmp_path / "checkpoints" / f"checkpoint_{value}"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
    kept.load_state()
    assert kept.values() == {3.0}


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    first = make_kept(tmp_path, total_limit=2)
    for _ in range(12):
        first.save_state()
    resumed = make_kept(tmp_path, total_limit=2)
    resumed.load_state()
    assert resumed.save_state().name == "checkpoint_12"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_11", "checkpoint_12"]


def test_a_run_that_does_not_continue_an_earlier_one_numbers_on_and_leaves_it(tmp_path: Path) -> None:
    first = make_kept(tmp_path, total_limit=2)
    for _ in range(4):
        first.save_state()
    second = make_kept(tmp_path, total_limit=2)
    with pytest.warns(UserWarning, match="up to checkpoint_3. This run did not load one") as caught:
        names = [second.save_state().name for _ in range(4)]
    assert len(caught) == 1
    assert names == ["checkpoint_4", "checkpoint_5", "checkpoint_6", "checkpoint_7"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"checkpoint_{number}" for number in (2, 3, 6, 7)]
    third = make_kept(tmp_path, total_limit=2)
    third.load_state()
    assert third.save_state().name == "checkpoint_8"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_7", "checkpoint_8"]


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    first = make_kept(tmp_path)
    first.save_state()
    first.save_state()
    fresh = make_kept(tmp_path)
    fresh.project_configuration.iteration = 1
    with pytest.raises(ValueError, match=r"checkpoint_1 already exists. Call load_state\(\) first"):
        fresh.save_state()


def test_checkpoints_of_an_earlier_run_are_pointed_out_and_the_new_one_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "checkpoint_7").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint_x").mkdir()
    kept = make_kept(tmp_path, total_limit=1)
    kept.project_configuration.iteration = 1
    with pytest.warns(UserWarning, match="'checkpoint_7' of an earlier run"):
        kept.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_x"]


def test_nothing_old_goes_before_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = make_kept(tmp_path, total_limit=1)
    kept.fill(3.0)
    kept.save_state()
    monkeypatch.setattr(durable.os, "fsync", no_room)
    with pytest.raises(OSError, match="No space left"):
        kept.save_state()
    monkeypatch.undo()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]
    kept.load_state()
    assert kept.values() == {3.0}
    assert kept.project_configuration.iteration == 1


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = make_kept(tmp_path, total_limit=1)
    kept.save_state()

    def refuse(*args: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError("read-only")

    monkeypatch.setattr(naming.shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="total_limit=1 could not be removed"):
        kept.save_state()


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    for name in (".checkpoint_4.0123abcd.saving", ".checkpoint_3.removing"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    make_kept(tmp_path).save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def test_a_given_folder_has_no_effect_on_automatic_names(tmp_path: Path) -> None:
    kept = make_kept(tmp_path)
    with pytest.warns(UserWarning, match="writes under an automatic name"):
        assert kept.save_state(tmp_path / "mine").name == "checkpoint_0"


def test_folders_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="pass output_dir"):
        make_kept().save_state()
    with pytest.raises(ValueError, match="pass input_dir"):
        make_kept().load_state()
    nowhere = make_kept(tmp_path)
    nowhere.project_configuration.project_dir = None
    with pytest.raises(ValueError, match="project_dir is None"):
        nowhere.save_state()
    with pytest.raises(ValueError, match="project_dir is None"):
        nowhere.load_state()


def test_a_project_folder_is_enough_for_automatic_names(tmp_path: Path) -> None:
    kept = make_kept()
    kept.project_configuration.project_dir = tmp_path
    kept.project_configuration.total_limit = 2
    for value in range(3):
        kept.fill(value)
        assert kept.save_state() == tmp_path / "checkpoints" / f"checkpoint_{value}"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    assert kept.save_state(tmp_path / "mine") == tmp_path / "mine"  # a name that is given counts
    again = make_kept()
    again.project_configuration.project_dir = tmp_path
    again.load_state()
    assert again.values() == {2.0}
    assert again.save_state().name == "checkpoint_3"


# ---- which one is loaded ----------------------------------------------------------------------------------------


def test_the_newest_complete_checkpoint_is_loaded(tmp_path: Path) -> None:
    kept = make_kept(tmp_path)
    for value in range(3):
        kept.fill(value)
        kept.save_state()
    (tmp_path / "checkpoints" / "checkpoint_2" / "optimizer.bin").unlink()
    (tmp_path / "checkpoints" / "checkpoint_10").mkdir()
    with pytest.warns(UserWarning, match=r"checkpoint_10 is not a checkpoint.*'optimizer\.bin' is missing"):
        kept.load_state()
    assert kept.values() == {1.0}
    assert kept.project_configuration.iteration == 11


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(tmp_path: Path) -> None:
    kept = make_kept(tmp_path)
    for value in range(3):
        kept.fill(value)
        kept.save_state()
    folder = tmp_path / "checkpoints"
    flip_a_byte(folder / "checkpoint_2" / "model.safetensors")
    with pytest.warns(
        UserWarning, match=r"loads \S+checkpoint_1, because .*checkpoint_2 is damaged: 'model.safetensors'"
    ):
        kept.load_state()
    assert kept.values() == {1.0}
    flip_a_byte(folder / "checkpoint_1" / "optimizer.bin")
    with pytest.warns(UserWarning, match="checkpoint_0, because .*checkpoint_2 is damaged.*checkpoint_1 is damaged"):
        kept.load_state()
    assert kept.values() == {0.0}
    with pytest.raises(ValueError, match="'model.safetensors' has the checksum"):  # a folder that is named is meant
        kept.load_state(folder / "checkpoint_2")
    flip_a_byte(folder / "checkpoint_0" / "optimizer.bin")
    with pytest.raises(
        ValueError, match=r"no complete checkpoint in .*checkpoint_2 is .*checkpoint_1 is .*checkpoint_0 is"
    ):
        kept.load_state()


def test_a_checkpoint_that_does_not_fit_is_not_passed_over(tmp_path: Path) -> None:
    kept = make_kept(tmp_path)
    kept.save_state()
    kept.save_state()
    kept._custom_objects.append(Counter())
    with pytest.raises(RuntimeError, match="1 registered objects, but 2"):
        kept.load_state()


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no complete checkpoint in .*nothing was saved there yet"):
        make_kept(tmp_path).load_state()
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(ValueError, match="no complete checkpoint in .*it holds nothing"):
        make_kept(tmp_path).load_state()


@pytest.mark.parametrize(("make", "reason"), [(lambda path: None, "does not exist"), (Path.touch, "is a file")])
def test_a_folder_that_is_none(tmp_path: Path, make: Callable[[Path], None], reason: str) -> None:
    make(tmp_path / "state")
    with pytest.raises(ValueError, match=reason):
        make_kept().load_state(tmp_path / "state")


def test_other_numbers_of_processes_are_pointed_out(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    text = (tmp_path / "state" / "manifest.json").read_text()
    for saved, reason in ((4, "RNG states of processes 1 to 3 are not used"), (1, "")):
        (tmp_path / "state" / "manifest.json").write_text(text.replace('"world_size": 1', f'"world_size": {saved}'))
        if reason:
            with pytest.warns(
                UserWarning, match=f"saved with num_processes=4 and is loaded with num_processes=1: .*{reason}"
            ):
                kept.load_state(tmp_path / "state")
        else:
            kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


# ---- hooks ------------------------------------------------------------------------------------------------------


def test_save_hooks_write_and_take_weights_away(tmp_path: Path) -> None:
    kept = make_kept()

    def hook(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        assert models is kept._models
        assert not os.path.exists(tmp_path / "state")
        os.makedirs(os.path.join(output_dir, "adapter"))
        torch.save(weights.pop(), os.path.join(output_dir, "adapter", "weights.bin"))

    handle = kept.keeper.register_save_state_pre_hook(hook)
    kept.save_state(tmp_path / "state")
    assert "model.safetensors" not in files(tmp_path / "state")
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None
    assert "adapter/weights.bin" in manifest.files
    assert sorted(load(tmp_path / "state" / "adapter" / "weights.bin")) == ["bias", "weight"]
    handle.remove()
    kept.save_state(tmp_path / "state")
    assert files(tmp_path / "state") == sorted([*FILES, "manifest.json"])


def test_load_hooks_take_models_away(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    kept.fill(4.0)
    seen = []
    handle = kept.keeper.register_load_state_pre_hook(lambda models, folder: seen.append((models.pop(), folder)))
    kept.load_state(tmp_path / "state")
    assert seen == [(kept._models[0], str(tmp_path / "state"))]
    assert kept.values() == {3.0, 4.0}
    handle.remove()
    kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


def test_a_hook_that_fails_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    kept = make_kept()
    kept.save_state(tmp_path / "state")

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        raise KeyError("mine")

    kept.keeper.register_save_state_pre_hook(hook)
    with pytest.raises(KeyError, match="mine"):
        kept.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    kept.load_state(tmp_path / "state")


# ---- nothing is lost or half done -------------------------------------------------------------------------------


def no_room(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["write", "fsync", "mkdir", "rename"])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    (tmp_path / "state" / "notes.txt").write_text("theirs")
    kept.fill(4.0)
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, step, no_room)
        with pytest.raises(OSError, match="No space left"):
            kept.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    kept.load_state(tmp_path / "state")
    assert kept.values() == {3.0}


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source: Any, target: Any) -> None:
        done.append(("rename", str(target)))
        real_rename(source, target)

    kept = make_kept()

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, "sub").mkdir()
        Path(output_dir, "sub", "mine").write_text("text")

    kept.keeper.register_save_state_pre_hook(hook)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    kept.save_state(tmp_path / "state")
    published = done.index(("rename", str(tmp_path / "state")))
    synced = {Path(path).relative_to(tmp_path).as_posix().partition("/")[2] for _, path in done[:published]}
    assert synced == {*FILES, "manifest.json", "sub", "sub/mine", ""}  # "" is the folder itself
    assert ("fsync", str(tmp_path)) in done[published:]


def test_a_state_that_would_not_load_is_refused_when_saving(tmp_path: Path) -> None:
    kept = make_kept()
    kept._custom_objects.append(Counter(Thing()))
    with pytest.raises(TypeError, match=r"registered object 1 \(Counter\) holds .*Thing at \['count'\]"):
        kept.save_state(tmp_path / "state")
    assert not os.listdir(tmp_path)
    kept._custom_objects.pop()
    kept._schedulers[0].best = Thing()
    with pytest.raises(TypeError, match=r"scheduler\.bin holds .*Thing"):
        kept.save_state(tmp_path / "state")
    with torch.serialization.safe_globals([Thing]):
        kept.save_state(tmp_path / "state")
        kept.load_state(tmp_path / "state")


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    cases = [
        (nn.Linear(3, 4), r"'weight' is \(2, 3\), the model has \(4, 3\)"),
        (nn.Sequential(nn.Linear(3, 2)), r"'0\.weight' is missing.*pass strict=False"),
        (nn.Linear(3, 2, bias=False), "'bias' is not in the model"),
    ]
    for model, reason in cases:
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(ValueError, match=f"do not fit model 0.*{reason}"):
            Kept([model], _custom_objects=[Counter()]).load_state(tmp_path / "state")
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    Kept([nn.Linear(3, 2, bias=False)], _custom_objects=[Counter()]).load_state(tmp_path / "state", strict=False)


def test_a_model_with_its_own_way_of_loading_is_asked(tmp_path: Path) -> None:
    kept = make_kept()
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")

    class Renaming(nn.Linear):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict({"weight": state_dict["weight"]}, strict=False)

    model = nn.Sequential(nn.Linear(3, 2))
    model.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *rest: state.update({f"0.{name}": state.pop(name) for name in list(state)})
    )
    for receiver in (Renaming(3, 2), model):
        Kept([receiver], _custom_objects=[Counter()]).load_state(tmp_path / "state")
        assert next(receiver.parameters()).eq(3.0).all()


def test_missing_objects_are_named(tmp_path: Path) -> None:
    kept = make_kept()
    kept.save_state(tmp_path / "state")
    more = make_kept()
    cases: list[tuple[Kept, type[Exception], str]] = [
        (Kept(kept._models * 2, _custom_objects=[Counter()]), ValueError, r"'model_1\.safetensors' is missing"),
        (Kept(_optimizers=more._optimizers * 2), ValueError, r"2 optimizers .* holds 1: 'optimizer_1\.bin'"),
        (Kept(_schedulers=more._schedulers * 3), ValueError, r"3 schedulers .* holds 1: 'scheduler_1\.bin'"),
        (Kept(), RuntimeError, r"holds 1 registered objects, but 0 are registered now \(none\)"),
        (Kept(_custom_objects=[Counter(), Counter()]), RuntimeError, r"but 2 are registered now \(Counter, Counter\)"),
    ]
    for other, kind, reason in cases:
        with pytest.raises(kind, match=reason):
            other.load_state(tmp_path / "state")


# ---- arguments --------------------------------------------------------------------------------------------------


def test_arguments_without_effect_are_pointed_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'client_state' has no effect"):
        make_kept().save_state(tmp_path / "state", client_state={})


def test_places_of_optimizers(tmp_path: Path) -> None:
    kept = make_kept()
    kept.save_state(tmp_path / "state")
    for place in (None, "cpu", "on_device"):
        kept.load_state(tmp_path / "state", map_location=place)
    with pytest.raises(TypeError, match="map_location='cuda'"):
        kept.load_state(tmp_path / "state", map_location="cuda")


def test_options_of_loading(tmp_path: Path) -> None:
    kept = make_kept()
    kept.save_state(tmp_path / "state", safe_serialization=False)
    places: list[Any] = ["cpu", torch.device("cpu"), "on_device", {"cuda:0": "cpu"}, lambda storage, place: storage]
    for options in ({"mmap": True}, {"weights_only": True}, *({"map_location": place} for place in places)):
        parameter = next(kept._models[0].parameters())
        saved = parameter.detach().clone()
        with torch.no_grad():
            parameter.zero_()
        kept.load_state(tmp_path / "state", load_kwargs=options)
        assert torch.equal(parameter, saved), options
    for options in ({"weights_only": False}, {"pickle_module": pickle}):
        with pytest.raises(
            ValueError, match="weights_only=False and pickle_module are refused, because they run code"
        ):
            kept.load_state(tmp_path / "state", load_kwargs=options)
    with pytest.raises(TypeError, match="load_kwargs has 'location', .* Choose from encoding, map_location, mmap"):
        kept.load_state(tmp_path / "state", load_kwargs={"location": "cpu"})


# ---- model folders ----------------------------------------------------------------------------------------------


def test_a_model_folder_is_written(tmp_path: Path) -> None:
    kept = make_kept()
    kept.save_model(kept._models[0], tmp_path / "model", max_shard_size=16)
    assert json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["metadata"] == {
        "total_size": 32
    }
    kept.save_model(kept._models[0], tmp_path / "model", safe_serialization=False)
    assert sorted(load(tmp_path / "model" / "pytorch_model.bin")) == ["bias", "weight"]


def test_a_model_folder_has_the_names_of_the_model_that_was_not_compiled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model[0] = torch.compile(model[0], backend="eager")
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(model), tmp_path / "model")
    assert load_state_dict(str(tmp_path / "model" / "model.safetensors")).keys() == expected.keys()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    load_checkpoint_in_model(model, tmp_path / "model", strict=True)
    assert all(map(torch.equal, model.state_dict().values(), expected.values()))


def test_model_folders_are_asked_for_models_and_folders(tmp_path: Path) -> None:
    kept = make_kept()
    with pytest.raises(TypeError, match="got dict"):
        kept.save_model({}, tmp_path / "model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'10G'"):
        kept.save_model(kept._models[0], tmp_path / "model", max_shard_size="10G")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        kept.save_model(kept._models[0], tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


def test_a_model_whose_parts_wait_on_disk_is_saved_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offloaded = dispatch_model(
        model, {"0": "cpu", "1": "disk", "2": "disk"}, main_device="cpu", offload_dir=tmp_path / "off"
    )
    accelerator = Accelerator(cpu=True)
    for safe in (True, False):
        accelerator.save_model(offloaded, tmp_path / str(safe), safe_serialization=safe)
        actual = load_state_dict(tmp_path / str(safe) / ("model.safetensors" if safe else "pytorch_model.bin"))
        assert actual.keys() == weights.keys()
        assert all(torch.equal(actual[name], tensor) for name, tensor in weights.items())
    assert not any(tensor.is_meta for tensor in accelerator.get_state_dict(offloaded).values())


def test_a_model_without_values_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"tensors on the meta device, which have no values: bias, weight of Linear"
    ):
        make_kept().save_model(nn.Linear(2, 2, device="meta"), tmp_path / "model")
    assert os.listdir(tmp_path) == []
