"""Reading a training state back: everything is read and verified before anything changes."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
from accel_ops.modules import customizes_loading
from accel_ops.staging import path_inside
from accel_ops.tensor_files import find_shared_names, read_tensors
from accel_state.warning import warn_user
from accelerate.checkpoint.late import TOKEN_KEY, added_by
from accelerate.checkpoint.legacy import list_legacy_files
from accelerate.checkpoint.loaders import is_stateful
from accelerate.checkpoint.manifest import DamagedCheckpointError, Manifest, share_of
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


def find_newest(folder: Path, skipped: Mapping[Path, str] | None = None) -> tuple[Checkpoint, list[str]]:
    """The automatically named checkpoint with the highest number that is complete.

    Args:
        folder: Where they are.
        skipped: Those found to be damaged, with what is wrong with them.

    Returns:
        It, and why newer ones cannot be used.

    Raises:
        ValueError: There is none.
    """
    problems = []
    for _, path in reversed(numbered_checkpoints(folder)):
        if skipped and path in skipped:
            problems.append(skipped[path])
            continue
        try:
            found = Checkpoint.open(path)
        except ValueError as error:
            problems.append(str(error))
        else:
            return found, problems
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
        with _saying_what_is_damaged(checkpoint):
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
            warn_user(
                f"{checkpoint.folder} holds no {SCALER_NAME!r}: it was saved without fp16, so the loss scale starts anew"
            )
    step_file = random_states_file(process_index)
    if (name := step_file) in own_names:
        state.random_states = read_dict(name)
        state.random_states.pop(TOKEN_KEY, None)
        state.step = state.random_states.pop("step", None)
    elif checkpoint.manifest is not None:
        state.step = checkpoint.manifest.step
    elif (step_file := random_states_file(0)) in checkpoint.names:
        state.step = read_dict(step_file).get("step")
    if state.step is not None and type(state.step) is not int:
        raise ValueError(f"{checkpoint.path(step_file)} is damaged: its step is {state.step!r}, no int")
    return state


@contextmanager
def _saying_what_is_damaged(checkpoint: Checkpoint) -> Iterator[None]:
    """Tell damage from what this run does not allow; where there are checksums, these tell."""
    try:
        yield
    except ValueError as error:
        if checkpoint.manifest is None and not isinstance(error.__cause__, pickle.UnpicklingError):
            raise DamagedCheckpointError(str(error)) from error
        raise


def _read_weights(checkpoint: Checkpoint, index: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """A model's weights, as views of the file: they are copied once, into the model."""
    safe = weights_file(index, safe_serialization=True)
    with _saying_what_is_damaged(checkpoint):
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
        warn_user(
            f"{name!r} in {checkpoint.folder} holds a whole sampler object of accelerate 1.15, which cannot be loaded "
            "without running code: the order of samples starts anew"
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
        complete_ties(model.state_dict(), weights)
        check_values(model, weights, f"The weights in {checkpoint.folder} do not fit model {index}", strict)


def check_values(model: nn.Module, values: Mapping[str, Any], problem: str, strict: bool) -> None:
    """See that values fit a module; one with a way of loading of its own is not asked.

    Args:
        model: Without wrappers.
        values: By name.
        problem: How the error begins.
        strict: Whether names must be the same on both sides.

    Raises:
        ValueError: There are values missing, too many, or of other shapes.
    """
    if has_own_way_of_loading(model):
        return
    own = model.state_dict()
    shapes = [
        f"{name!r} is {_shape_of(values[name])}, the model has {tuple(own[name].shape)}"
        for name in own
        if isinstance(own[name], torch.Tensor)
        and name in values
        and getattr(values[name], "shape", None) != own[name].shape
    ]
    missing = [f"{name!r} is missing" for name in own if name not in values] if strict else []
    surplus = [f"{name!r} is not in the model" for name in values if name not in own] if strict else []
    if problems := [*shapes, *missing, *surplus]:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(
            f"{problem} ({type(model).__name__}): {'; '.join(problems[:3])}{more}. Build the model as it was when saved"
            + (", or pass strict=False" if not shapes else "")
        )


def _shape_of(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else tuple(shape)


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


def has_own_way_of_loading(model: nn.Module) -> bool:
    """True when only the model knows which names and shapes it takes."""
    keeps_extra_state = any(type(one).set_extra_state is not nn.Module.set_extra_state for one in model.modules())
    return keeps_extra_state or customizes_loading(model)
