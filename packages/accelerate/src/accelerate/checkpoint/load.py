"""Reading a training state back: everything is read and verified before anything changes."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_integrations.parallel.whole_state import cut_like
from accel_ops.filenames import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_WEIGHTS_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
)
from accel_ops.files import load
from accel_ops.modules import model_has_dtensor
from accel_ops.random import restore_rng_state
from accel_ops.staging import path_inside
from accel_ops.tensor_files import find_shared_names, read_tensors
from accelerate.checkpoint.late import TOKEN_KEY, added_by
from accelerate.checkpoint.legacy import list_legacy_files
from accelerate.checkpoint.loaders import is_stateful, restore_order
from accelerate.checkpoint.manifest import Manifest, share_of
from accelerate.checkpoint.naming import count_files, numbered, numbered_checkpoints, weights_file
from accelerate.checkpoint.save import custom_object_file, position_file, random_states_file


@dataclass(frozen=True)
class Checkpoint:
    """A folder known to hold a complete checkpoint, by the sizes of its files.

    Attributes:
        folder: Where it is.
        names: Its files.
        manifest: Its description; None for checkpoints of accelerate 1.15.
    """

    folder: Path
    names: frozenset[str]
    manifest: Manifest | None

    @classmethod
    def open(cls, folder: Path, *, with_divided: bool = False) -> Checkpoint:
        """Look at a folder.

        Args:
            folder: Where it is.
            with_divided: Whether states in the forms of sharded training can be read too.

        Raises:
            ValueError: It is missing, no checkpoint, not complete, or a checkpoint of another engine.
        """
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "does not exist"
            raise ValueError(f"The checkpoint folder {folder} {reason}: give the folder that save_state returned")
        manifest = Manifest.read(folder)
        if manifest is None:
            return cls(folder, frozenset(list_legacy_files(folder, with_divided=with_divided)), None)
        manifest.check_sizes(folder)
        return cls(folder, frozenset(manifest.files), manifest)

    @property
    def world_size(self) -> int:
        """How many processes saved it."""
        if self.manifest is not None:
            return self.manifest.world_size
        return sum(name.startswith(f"{RNG_STATE_NAME}_") for name in self.names)

    def verify(self, index: int = 0, count: int = 1) -> None:
        """Compare checksums, of a fair share of the files where `count` processes do it together.

        Raises:
            ValueError: Naming a file whose content has changed.
        """
        if self.manifest is not None:
            self.manifest.check_contents(self.folder, share_of(self.names, self.manifest, index, count))

    def path(self, name: str) -> Path:
        """Where a file of the checkpoint is."""
        return path_inside(self.folder, name)


def find_newest(folder: Path) -> Checkpoint:
    """The automatically named checkpoint with the highest number that is complete.

    Raises:
        ValueError: There is none.
    """
    problems = []
    for _, path in reversed(numbered_checkpoints(folder)):
        try:
            found = Checkpoint.open(path)
        except ValueError as error:
            problems.append(str(error))
        else:
            if problems:
                warnings.warn(f"Loading {path}, because newer ones cannot be used: {' '.join(problems)}", stacklevel=2)
            return found
    reasons = f": {' '.join(problems)}" if problems else ", because nothing was saved there yet"
    raise ValueError(f"There is no complete checkpoint in {folder}{reasons}. Start without load_state")


@dataclass
class TrainingState:
    """What was read of a checkpoint, in the order of the prepared objects; not applied yet."""

    weights: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    samplers: dict[int, Any] = field(default_factory=dict)
    positions: dict[int, Any] = field(default_factory=dict)
    scaler: Any = None
    random_states: dict[str, Any] | None = None
    step: int | None = None
    custom: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Receivers:
    """The objects of this run that a checkpoint is loaded into."""

    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    scaler: Any = None
    custom: Sequence[Any] = ()


def read_state(
    checkpoint: Checkpoint,
    receivers: Receivers,
    process_index: int = 0,
    *,
    map_location: str | torch.device | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    verify: Callable[[], None] = lambda: None,
) -> TrainingState:
    """Read everything that the run has a receiver for, while other threads verify it.

    Args:
        checkpoint: What to read.
        receivers: The objects to read for. There may be fewer than were saved.
        process_index: Whose random states and positions to read.
        map_location: Where the tensors of optimizers go.
        load_kwargs: Further arguments of `torch.load`.
        verify: Raises when the checkpoint is damaged.

    Raises:
        ValueError: A file is damaged, holds more than plain data, or is missing for an object.
    """
    options = dict(load_kwargs or {})
    with ThreadPoolExecutor(1, "verify") as pool:
        verified = pool.submit(verify)
        try:
            state = _read_all(checkpoint, receivers, process_index, map_location, options)
        finally:
            verified.result()  # a damaged file is best reported as one
    return state


def _read_all(
    checkpoint: Checkpoint,
    receivers: Receivers,
    process_index: int,
    map_location: str | torch.device | None,
    options: dict[str, Any],
) -> TrainingState:
    state = TrainingState()

    def read(name: str, location: Any = "cpu") -> Any:
        return load(checkpoint.path(name), map_location=location, **options)

    def read_dict(name: str, location: Any = "cpu") -> dict[str, Any]:
        found = read(name, location)
        if not isinstance(found, dict):
            raise ValueError(
                f"{checkpoint.path(name)} holds a {type(found).__name__} instead of a state: load another checkpoint"
            )
        return found

    def read_each(kind: str, name: str, count: int, location: Any = "cpu") -> list[Any]:
        _check_count(checkpoint, kind, name, count)
        return [read_dict(numbered(name, index), location) for index in range(count)]

    late = frozenset(added_by(checkpoint.folder, checkpoint.manifest, process_index))
    own_names = checkpoint.names | late
    for index in range(count_files(checkpoint.names, SAFE_WEIGHTS_NAME, WEIGHTS_NAME)):
        state.weights.append(_read_weights(checkpoint, index, options))
    state.optimizers = read_each(
        "optimizer", f"{OPTIMIZER_NAME}.bin", len(receivers.optimizers), map_location or "cpu"
    )
    state.schedulers = read_each("scheduler", f"{SCHEDULER_NAME}.bin", len(receivers.schedulers))
    state.custom = _read_custom(checkpoint, receivers.custom, read)
    for index, loader in enumerate(receivers.dataloaders):
        if (name := numbered(f"{SAMPLER_NAME}.bin", index)) in checkpoint.names:
            state.samplers[index] = _read_sampler(checkpoint, name, read_dict)
        positions = (position_file(index, process_index), position_file(index, 0))
        if is_stateful(loader) and (name := next((name for name in positions if name in own_names), "")):
            state.positions[index] = read_dict(name)
    if receivers.scaler is not None:
        if SCALER_NAME in checkpoint.names:
            state.scaler = read_dict(SCALER_NAME)
        else:
            warnings.warn(
                f"{checkpoint.folder} holds no {SCALER_NAME!r}: it was saved without fp16, so the loss scale starts anew",
                stacklevel=2,
            )
    if (name := random_states_file(process_index)) in own_names:
        state.random_states = read_dict(name)
        state.random_states.pop(TOKEN_KEY, None)
        state.step = state.random_states.pop("step", None)
    elif checkpoint.manifest is not None:
        state.step = checkpoint.manifest.step
    elif (name := random_states_file(0)) in checkpoint.names:
        state.step = read_dict(name).get("step")
    return state


def _read_weights(checkpoint: Checkpoint, index: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """A model's weights, as views of the file: they are copied once, into the model."""
    safe = weights_file(index, safe_serialization=True)
    if safe in checkpoint.names:
        return read_tensors(checkpoint.path(safe))
    path = checkpoint.path(weights_file(index, safe_serialization=False))
    weights = load(path, map_location="cpu", **{"mmap": zipfile.is_zipfile(path), **options})
    if not isinstance(weights, dict):
        raise ValueError(
            f"{path} holds a {type(weights).__name__} instead of a model's weights: load another checkpoint"
        )
    return weights


def _check_count(checkpoint: Checkpoint, kind: str, name: str, wanted: int) -> None:
    found = count_files(checkpoint.names, name)
    if found < wanted:
        raise ValueError(
            f"{wanted} {kind}s are prepared, but the checkpoint {checkpoint.folder} holds {found}: {numbered(name, found)!r} "
            "is missing. Prepare the same objects as when it was saved, in the same order"
        )


def _read_custom(checkpoint: Checkpoint, objects: Sequence[Any], read: Callable[[str], Any]) -> list[Any]:
    found = 0
    while custom_object_file(found) in checkpoint.names:
        found += 1
    if found != len(objects):
        kinds = ", ".join(type(obj).__name__ for obj in objects) or "none"
        raise RuntimeError(
            f"The checkpoint {checkpoint.folder} holds {found} registered objects, but {len(objects)} are registered now "
            f"({kinds}): call register_for_checkpointing with the same objects as when it was saved"
        )
    return [read(custom_object_file(index)) for index in range(found)]


def _read_sampler(checkpoint: Checkpoint, name: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(name)
    except ValueError:
        if checkpoint.manifest is not None:
            raise
        warnings.warn(
            f"{name!r} in {checkpoint.folder} holds a whole sampler object of accelerate 1.15, which cannot be loaded "
            "without running code: the order of samples starts anew",
            stacklevel=2,
        )
        return None


def check_weights(checkpoint: Checkpoint, models: Sequence[nn.Module], state: TrainingState, strict: bool) -> None:
    """See that the weights fit the models, before any of them changes.

    Args:
        checkpoint: Where the weights are from.
        models: Without wrappers; there may be fewer than were saved.
        state: Its weights are completed by the other names of tied ones.
        strict: Whether names must be the same on both sides.

    Raises:
        ValueError: There are weights missing, too many, or of other shapes.
    """
    found = len(state.weights)
    if found < len(models):
        raise ValueError(
            f"{len(models)} models are prepared, but the checkpoint {checkpoint.folder} holds the weights of {found}: "
            f"{weights_file(found, True)!r} is missing. Prepare the same models as when it was saved, in the same order"
        )
    for index, (model, weights) in enumerate(zip(models, state.weights, strict=False)):
        own = model.state_dict()
        complete_ties(own, weights)
        if _has_own_way_of_loading(model):
            continue
        shapes = [
            f"{name!r} is {tuple(weights[name].shape)}, the model has {tuple(own[name].shape)}"
            for name in own
            if isinstance(own[name], torch.Tensor) and name in weights and weights[name].shape != own[name].shape
        ]
        missing = [f"{name!r} is missing" for name in own if name not in weights] if strict else []
        surplus = [f"{name!r} is not in the model" for name in weights if name not in own] if strict else []
        if problems := [*shapes, *missing, *surplus]:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise ValueError(
                f"The weights in {checkpoint.folder} do not fit model {index} ({type(model).__name__}): "
                f"{'; '.join(problems[:3])}{more}. Build the model as it was when saved"
                + (", or pass strict=False" if not shapes else "")
            )


def complete_ties(own: Mapping[str, Any], weights: dict[str, Any]) -> None:
    """Give tied weights back the names under which they were not saved.

    Args:
        own: The state dict of the model that is loaded into, which says what is tied.
        weights: Changed in place.
    """
    for names in find_shared_names(own):
        saved = next((name for name in names if name in weights), None)
        if saved is not None:
            for name in names:
                weights.setdefault(name, weights[saved])


def _has_own_way_of_loading(model: nn.Module) -> bool:
    """True when only the model knows which names and shapes it takes."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return True
    return any(
        module._load_state_dict_pre_hooks
        or type(module).set_extra_state is not nn.Module.set_extra_state
        or type(module)._load_from_state_dict not in _USUAL_LOADING
        for module in model.modules()
    )


_USUAL_LOADING = {nn.Module._load_from_state_dict, nn.modules.batchnorm._NormBase._load_from_state_dict}


def apply_weights(models: Sequence[nn.Module], state: TrainingState, **load_model_kwargs: Any) -> None:
    """Copy the weights into the models, with arguments of their `load_state_dict`."""
    for model, weights in zip(models, state.weights, strict=False):
        if load_model_kwargs.get("assign"):  # the model would live in the checkpoint's file
            weights = {name: value.clone() for name, value in weights.items()}
        if model_has_dtensor(model):
            own = model.state_dict()
            weights = {name: cut_like(value, own[name]) if name in own else value for name, value in weights.items()}
        model.load_state_dict(weights, **load_model_kwargs)


def apply_state(receivers: Receivers, state: TrainingState) -> None:
    """Give every object its state back, and the process its random states, which come last."""
    _apply(receivers.optimizers, state.optimizers)
    _apply(receivers.schedulers, state.schedulers)
    for index, loader in enumerate(receivers.dataloaders):
        if state.samplers.get(index) is not None:
            restore_order(loader, state.samplers[index])
        if index in state.positions:
            loader.load_state_dict(state.positions[index])
    if state.scaler is not None:
        receivers.scaler.load_state_dict(state.scaler)
    _apply(receivers.custom, state.custom)
    if state.random_states is not None:
        _apply_random_states(state.random_states)


def _apply_random_states(states: dict[str, Any]) -> None:
    """Restore random states, last of all; those of other hardware are no reason to lose the rest."""
    try:
        restore_rng_state(states)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        warnings.warn(
            f"The random states do not fit this machine or are of another version ({error}): random choices start anew",
            stacklevel=2,
        )


def _apply(objects: Iterable[Any], states: Iterable[Any]) -> None:
    for obj, state in zip(objects, states, strict=True):
        obj.load_state_dict(state)


def warn_of_other_world_size(checkpoint: Checkpoint, num_processes: int) -> None:
    """Say what cannot be restored when the number of processes has changed."""
    saved = checkpoint.world_size
    if saved == num_processes:
        _warn_of_absent(checkpoint)
    if saved in (0, num_processes):
        return
    first, last = sorted((saved, num_processes))
    ranks = f"process {first}" if last - first == 1 else f"processes {first} to {last - 1}"
    effect = (
        f"{ranks} cannot go on with random states of an earlier run"
        if num_processes > saved
        else f"the random states of {ranks} are not used"
    )
    warnings.warn(
        f"The checkpoint {os.fspath(checkpoint.folder)} was saved with num_processes={saved} and is loaded with "
        f"num_processes={num_processes}: {effect}. Weights, optimizers and schedulers are complete; choose the batch size "
        "per process anew if the global one is to stay",
        stacklevel=4,
    )


def _warn_of_absent(checkpoint: Checkpoint) -> None:
    """Say whose random states are missing because the main process saved alone."""
    manifest = checkpoint.manifest
    absent = [rank for rank in manifest.absent if not added_by(checkpoint.folder, manifest, rank)] if manifest else []
    if absent:
        warnings.warn(
            f"The checkpoint {os.fspath(checkpoint.folder)} was saved by the main process alone: random choices start anew on "
            f"processes {', '.join(map(str, absent))}. Everything else is complete; call save_state on all processes to save "
            "their random states, too",
            stacklevel=5,
        )
