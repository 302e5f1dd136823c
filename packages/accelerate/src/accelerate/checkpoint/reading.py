"""Reading a training state back: everything is read and verified before anything changes."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from accel_integrations.training_state.formats.full import check_count, read_dict
from accel_integrations.training_state.formats.sharded import DEEPSPEED_STATES
from accel_integrations.training_state.window import Window, read_window
from accel_ops.files.filenames import (
    CUSTOM_OBJECT_NAME,
    FSDP_MODEL_NAME,
    MODEL_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    numbered,
)
from accel_ops.files.serialization import LOAD_OPTIONS, load
from accel_ops.files.staging import path_inside
from accel_state.warning import warn_user
from accelerate.checkpoint.manifest import TOKEN_KEY, DamagedCheckpointError, Manifest, added_by, files_to_verify
from accelerate.checkpoint.naming import numbered_checkpoints
from accelerate.checkpoint.writing import READING_KEY, custom_object_file, position_file, random_states_file


@dataclass(frozen=True)
class Checkpoint:
    """A folder that holds a complete checkpoint, judged by the sizes of its files.

    Attributes:
        folder: Where it is.
        names: Its files.
        manifest: Its manifest; None for checkpoints of accelerate 1.15.
    """

    folder: Path
    names: frozenset[str]
    manifest: Manifest | None

    @classmethod
    def open(cls, folder: Path, *, with_sharded: bool = False) -> Checkpoint:
        """Check a folder and list its files.

        Args:
            folder: Where it is.
            with_sharded: Whether the engine can read sharded states, too.

        Raises:
            ValueError: It is missing, not a checkpoint, not complete, or a checkpoint of another engine.
        """
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "does not exist"
            raise ValueError(f"The checkpoint folder {folder} {reason}. Pass the folder that save_state() returned.")
        manifest = Manifest.read(folder)
        if manifest is None:
            return cls(folder, frozenset(list_legacy_files(folder, with_sharded=with_sharded)), None)
        manifest.check_sizes(folder)
        return cls(folder, frozenset(manifest.files), manifest)

    @property
    def world_size(self) -> int:
        """How many processes saved it."""
        if self.manifest is not None:
            return self.manifest.world_size
        return sum(name.startswith(f"{RNG_STATE_NAME}_") for name in self.names)

    def verify(self, index: int = 0, count: int = 1) -> None:
        """Compare checksums: of the files of process `index` where `count` processes split the work.

        Raises:
            ValueError: Naming a file whose content has changed.
        """
        if self.manifest is not None:
            self.manifest.check_contents(self.folder, files_to_verify(self.names, self.manifest, index, count))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block whose errors mean a damaged file, unless the file was rejected as unsafe or checksums decide."""
        try:
            yield
        except ValueError as error:
            if self.manifest is None and not isinstance(error.__cause__, pickle.UnpicklingError):
                raise DamagedCheckpointError(str(error)) from error
            raise

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
            checkpoint = Checkpoint.open(path)
        except ValueError as error:
            problems.append(str(error))
        else:
            return checkpoint, problems
    reasons = f": {' '.join(problems)}" if problems else ", because nothing was saved there yet"
    raise ValueError(f"There is no complete checkpoint in {folder}{reasons}. Start without load_state().")


@dataclass
class TrainingState:
    """What was read of a checkpoint besides models and optimizers, in the order of the prepared objects."""

    schedulers: list[Any] = field(default_factory=list)
    samplers: dict[int, Any] = field(default_factory=dict)
    positions: dict[int, Any] = field(default_factory=dict)
    scaler: Any = None
    random_states: dict[str, Any] | None = None
    reading: dict[int, Any] = field(default_factory=dict)
    step: int | None = None
    window: Window | None = None
    custom: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Receivers:
    """The objects of this run that a checkpoint is loaded into, besides models and optimizers.

    Attributes:
        schedulers: With `load_state_dict(state)`.
        dataloaders: Prepared loaders.
        scaler: The precision or gradient scaler that has the loss scale; None where there is none.
        custom: Objects registered with `register_for_checkpointing`.
    """

    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    scaler: Any = None
    custom: Sequence[Any] = ()


def torch_load_arguments(
    load_kwargs: Mapping[str, Any] | None, map_location: Any, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    """Divide `load_kwargs` into where tensors of optimizers go and the other arguments of `torch.load`.

    Args:
        load_kwargs: As for `Accelerator.load_state`. Its `map_location` may be anything that `torch.load` takes.
        map_location: None, "cpu" or "on_device", when it is not in `load_kwargs`.
        device: The device of this process.

    Raises:
        ValueError: The arguments would run code from a file.
        TypeError: `torch.load` does not take one of them with `weights_only=True`.
    """
    options = dict(load_kwargs or {})
    if options.pop("weights_only", True) is not True or options.pop("pickle_module", None) is not None:
        raise ValueError(
            "load_state: weights_only=False and pickle_module are refused, because they run code from the checkpoint: leave them "
            "out, and allow classes that you trust with torch.serialization.add_safe_globals([...])."
        )
    if unknown := options.keys() - LOAD_OPTIONS - {"map_location"}:
        raise TypeError(
            f"load_state: load_kwargs has {min(unknown)!r}, which is not an argument of torch.load that can be used here. Choose "
            f"from {', '.join(sorted(LOAD_OPTIONS | {'map_location', 'weights_only'}))}."
        )
    location = options.pop("map_location", None)
    if location is None or location == "on_device":
        location = optimizer_location(location or map_location, device)
    return location, options


def optimizer_location(map_location: Any, device: torch.device) -> torch.device:
    """Where the tensors of an optimizer go while they are loaded.

    Raises:
        TypeError: `map_location` is none of None, "cpu" and "on_device".
    """
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location={map_location!r} is not valid. Choose from None, 'cpu' and 'on_device'.")
    return device if map_location == "on_device" else torch.device("cpu")


Read = TypeVar("Read")


def read_verified(read: Callable[[], Read], verify: Callable[[], None]) -> Read:
    """Read while another thread verifies.

    Args:
        read: Reads a state.
        verify: Raises when the checkpoint is damaged; then its error is raised, whatever `read` found.
    """
    with ThreadPoolExecutor(1, "verify") as pool:
        verified = pool.submit(verify)
        try:
            return read()
        finally:
            verified.result()  # a damaged file is best reported as one


def read_state(
    checkpoint: Checkpoint,
    receivers: Receivers,
    process_index: int = 0,
    num_processes: int = 1,
    *,
    load_kwargs: Mapping[str, Any] | None = None,
) -> TrainingState:
    """Read the states of all objects that the run has.

    Args:
        checkpoint: What to read.
        receivers: The objects to read for. There may be fewer than were saved.
        process_index: Whose random states, positions and gradients to read.
        num_processes: How many processes load.
        load_kwargs: Further arguments of `torch.load`.

    Raises:
        ValueError: A file is damaged, holds more than plain data, or is missing for one of the objects.
    """
    state = TrainingState()
    options = dict(load_kwargs or {})

    def read_each(name: str) -> dict[str, Any]:
        return read_dict(checkpoint, name, load_kwargs=options)

    own_names = checkpoint.names | frozenset(added_by(checkpoint.folder, checkpoint.manifest, process_index))
    scheduler_file = f"{SCHEDULER_NAME}.bin"
    check_count(checkpoint, "scheduler", scheduler_file, len(receivers.schedulers))
    state.schedulers = [read_each(numbered(scheduler_file, index)) for index in range(len(receivers.schedulers))]
    state.custom = _read_custom(checkpoint, receivers.custom, options)
    for index, loader in enumerate(receivers.dataloaders):
        if (name := numbered(f"{SAMPLER_NAME}.bin", index)) in checkpoint.names:
            state.samplers[index] = _read_sampler(checkpoint, name, read_each)
        positions = (position_file(index, process_index), position_file(index, 0))
        if getattr(loader, "reads_with_torchdata", False) and (
            name := next((name for name in positions if name in own_names), "")
        ):
            state.positions[index] = read_each(name)
    if receivers.scaler is not None:
        if SCALER_NAME in checkpoint.names:
            state.scaler = read_each(SCALER_NAME)
        else:
            warn_user(
                f"{checkpoint.folder} has no {SCALER_NAME!r}, because it was saved without fp16. The loss scale starts from its "
                "initial value."
            )
    state.window = read_window(own_names, read_each, process_index, num_processes, checkpoint.world_size)
    step_file = random_states_file(process_index)
    if (name := step_file) in own_names:
        state.random_states = read_each(name)
        state.random_states.pop(TOKEN_KEY, None)
        state.step = state.random_states.pop("step", None)
        state.reading = state.random_states.pop(READING_KEY, {})
    elif checkpoint.manifest is not None:
        state.step = checkpoint.manifest.step
    elif (step_file := random_states_file(0)) in checkpoint.names:
        state.step = read_each(step_file).get("step")
    if state.step is not None and type(state.step) is not int:
        raise ValueError(
            f"{checkpoint.path(step_file)} is damaged: its step is {state.step!r}, not an int. Load another checkpoint."
        )
    return state


def _read_custom(checkpoint: Checkpoint, objects: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    def read(name: str) -> Any:
        with checkpoint.reading():
            return load(checkpoint.path(name), map_location="cpu", **options)

    count = 0
    while custom_object_file(count) in checkpoint.names:
        count += 1
    if count != len(objects):
        kinds = ", ".join(type(obj).__name__ for obj in objects) or "none"
        raise RuntimeError(
            f"The checkpoint {checkpoint.folder} holds {count} registered objects, but {len(objects)} are registered now "
            f"({kinds}). Call register_for_checkpointing() with the same objects as when it was saved."
        )
    return [read(custom_object_file(index)) for index in range(count)]


def _read_sampler(checkpoint: Checkpoint, name: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(name)
    except ValueError:
        if checkpoint.manifest is not None:
            raise
        warn_user(
            f"{name!r} in {checkpoint.folder} holds a pickled sampler object of accelerate 1.15, which cannot be loaded "
            "without running code. The shuffling order of the samples is not restored."
        )
        return None


TRAINING_FILES = re.compile(
    r"(?:model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.(?:safetensors|bin)"
    rf"|{RNG_STATE_NAME}_\d+\.pkl|{CUSTOM_OBJECT_NAME}_\d+\.pkl|{re.escape(SCALER_NAME)}"
)
SHARDED = re.compile(rf"{FSDP_MODEL_NAME}(?:_\d+)?(?:_rank\d+)?(?:\.bin)?")
OTHER_ENGINES = {
    "FSDP": re.compile(rf"{FSDP_MODEL_NAME}.*|.*\.distcp"),
    "DeepSpeed": re.compile(r"zero_to_fp32\.py|zero_pp_rank_.*"),
    "Megatron-LM": re.compile(r"latest_checkpointed_iteration\.txt"),
}

READABLE = ("FSDP", "DeepSpeed")
"""Engines whose sharded checkpoints can be read."""


def list_legacy_files(folder: Path, *, with_sharded: bool = False) -> list[str]:
    """The files of a checkpoint that has no manifest, checked for truncation.

    Args:
        folder: Where they are.
        with_sharded: Whether to list sharded states, too, by the names of their folders.

    Raises:
        ValueError: The folder is no checkpoint, is one of another engine, or holds a file that is not complete.
    """
    present = sorted(entry.name for entry in os.scandir(folder))
    for engine, pattern in OTHER_ENGINES.items():
        if with_sharded and engine in READABLE:
            continue
        if alien := next((name for name in present if pattern.fullmatch(name)), None):
            raise ValueError(
                f"{folder} is a checkpoint of {engine}, as {alien!r} shows, and this run does not use {engine}. Load it with "
                "the settings with which it was saved."
            )
    names = [name for name in present if TRAINING_FILES.fullmatch(name)]
    if not names:
        shown = ", ".join(map(repr, present[:5])) or "nothing"
        raise ValueError(
            f"{folder} is not a checkpoint: it holds {shown} instead of a manifest.json or files like model.safetensors and "
            "random_states_0.pkl. Pass the folder that save_state() returned."
        )
    sharded = [name for name in present if with_sharded and SHARDED.fullmatch(name)]
    if with_sharded:
        inner = (path.relative_to(folder).as_posix() for path in folder.glob(f"{MODEL_NAME}*/*.pt"))
        sharded += sorted(name for name in inner if DEEPSPEED_STATES.fullmatch(name))
    for name in names:
        if problem := _find_truncation(folder / name):
            raise ValueError(f"The checkpoint {folder} is not complete: {name!r} {problem}. Load another checkpoint.")
    return names + sharded


def _find_truncation(path: Path) -> str | None:
    """How a file is truncated, read from its first and last bytes alone; None where it seems complete."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return None if zipfile.is_zipfile(path) or _is_old_pickle(path) else f"is truncated at {size} bytes"
    with open(path, "rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        ends = [
            int(end) for end in re.findall(rb'"data_offsets":\s*\[\d+,\s*(\d+)\]', file.read(min(header_bytes, size)))
        ]
    expected = 8 + header_bytes + max(ends, default=0)
    return None if size == expected else f"has {size} bytes, its header says {expected}"


def _is_old_pickle(path: Path) -> bool:
    """True for the format of torch before 1.6, whose length cannot be checked without reading all of it."""
    with open(path, "rb") as file:
        return file.read(1) == b"\x80"
