"""Loading a checkpoint: everything is read and compared on all ranks before anything changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_data.epoch import EpochPosition
from accel_integrations.training_state.compatibility import check_values, loads_itself
from accel_integrations.training_state.interface import LoadRequest, PendingLoad
from accel_integrations.training_state.window import apply_window, check_window
from accel_ops.collectives.agreement import Ranks
from accel_ops.files.filenames import MODEL_NAME, SAFE_MODEL_NAME, SAMPLER_NAME, SCALER_NAME, numbered
from accel_ops.files.staging import recover
from accel_ops.random import capture_rng_state, restore_rng_state
from accel_state.logging import get_logger
from accel_state.warning import warn_user
from accelerate.checkpoint.manifest import DamagedCheckpointError, added_by
from accelerate.checkpoint.naming import checkpoints_folder, numbered_checkpoints
from accelerate.checkpoint.reading import (
    Checkpoint,
    Receivers,
    TrainingState,
    find_newest,
    read_state,
    read_verified,
    torch_load_arguments,
)
from accelerate.checkpoint.writing import (
    custom_object_file,
    restore_order,
    restore_reading,
    schedulers_with_files,
)

if TYPE_CHECKING:
    from accelerate.interface import AcceleratorInterface


LoadHook = Callable[[list[nn.Module], str], None]
_Contents = tuple[PendingLoad, TrainingState]
_Read = Callable[[Checkpoint], _Contents]

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Attempt:
    """What this process has read of a checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        contents: Its states; None where it is damaged.
        damage: What is wrong with it.
    """

    checkpoint: Checkpoint
    contents: _Contents | None
    damage: str | None = None


class StateLoader:
    """One load of a training state.

    Args:
        accelerator: What to load into.
        hooks: Called with the models and the folder before models are loaded.
    """

    def __init__(self, accelerator: AcceleratorInterface, hooks: Sequence[LoadHook]) -> None:
        self._accelerator = accelerator
        self._hooks = hooks
        self._ranks = Ranks(accelerator.state)
        self._skipped: dict[Path, str] = {}
        self._passed_over: list[str] = []

    def load(
        self, input_dir: str | os.PathLike[str] | None, load_kwargs: Mapping[str, Any] | None, **model_kwargs: Any
    ) -> None:
        """Load it; see `Accelerator.load_state`."""
        accelerator, ranks = self._accelerator, self._ranks
        precision = accelerator.engine.precision
        receivers = Receivers(
            schedulers_with_files(accelerator),
            accelerator._dataloaders,
            precision if precision.state_dict() is not None else None,
            accelerator._custom_objects,
        )
        map_location = model_kwargs.pop("map_location", None)
        location, options = torch_load_arguments(load_kwargs, map_location, accelerator.state.device)

        def read(checkpoint: Checkpoint) -> tuple[PendingLoad, TrainingState]:
            pending = accelerator.engine.open(LoadRequest(checkpoint, location, options, model_kwargs))
            return pending, read_state(checkpoint, receivers, ranks.rank, ranks.count, load_kwargs=options)

        checkpoint, pending, state = self._read(input_dir, read)

        def check() -> None:
            pending.check()
            check_objects(checkpoint, receivers, state)
            check_window(state.window, accelerator.engine, accelerator._models, str(checkpoint.folder))

        def check_models() -> None:
            models = list(accelerator._models)
            for hook in self._hooks:
                hook(models, os.fspath(checkpoint.folder))
            pending.check_models(models)

        # The optimizers are compared before a hook of the program runs, which may load models itself and take them off the
        # list; weights are compared after it.
        ranks.together(f"use the checkpoint {checkpoint.folder}", check)
        ranks.together(f"use the checkpoint {checkpoint.folder}", check_models)
        with naming_what_was_loaded() as loaded:
            # Only loading shows what objects of the program accept, so weights wait until all have on all ranks.
            ranks.together("load its objects", lambda: apply_objects(receivers, state, loaded))
            loaded.append("optimizers and models")
            ranks.together("load the optimizers and models", pending.apply)
        # Random states come after everything that draws numbers while it loads.
        apply_random_states(state.random_states)
        if state.step is not None:
            accelerator.step = state.step
        apply_window(state.window, accelerator.engine, accelerator._models)
        if ranks.is_main and not accelerator._models and not self._hooks:
            _warn_of_unprepared_models(checkpoint)
        elif ranks.is_main:
            _warn_of_other_world_size(checkpoint, ranks.count)
        if accelerator.project_configuration.automatic_checkpoint_naming or input_dir is None:
            self._continue_numbering()

    # ---- reading ------------------------------------------------------------------------------------------------

    def _read(
        self,
        input_dir: str | os.PathLike[str] | None,
        read: _Read,
    ) -> tuple[Checkpoint, PendingLoad, TrainingState]:
        """Read and verify the checkpoint; the newest undamaged one, when none is named."""
        ranks = self._ranks
        while True:
            candidate = ranks.on_main("find the checkpoint", lambda: self._find(input_dir))
            named = candidate if input_dir is None else Path(input_dir).expanduser()
            folder, here = self._folder_here(named)
            logger.info("Loading the training state from %s", folder)

            reading = partial(self._read_from, folder, here, read, keeps_damage=input_dir is None)
            mine = ranks.each(f"read the checkpoint {folder}", reading)
            # What is damaged on one rank is damaged for all, or they would go on to load different checkpoints.
            damage = next(filter(None, ranks.all_gather(mine.damage)), None)
            if mine.contents is not None and damage is None:
                if self._passed_over:
                    reasons = " ".join(self._passed_over)
                    warn_user(f"load_state() loads {candidate}, because newer checkpoints cannot be used: {reasons}")
                return mine.checkpoint, *mine.contents
            self._skipped[candidate] = str(damage)

    def _read_from(self, folder: Path, here: list[int], read: _Read, *, keeps_damage: bool) -> _Attempt:
        """Read a checkpoint on this process while its share of the files is verified.

        Args:
            folder: The folder of the checkpoint.
            here: The ranks of this machine, which share the work of verifying.
            read: Reads a checkpoint.
            keeps_damage: Return what is wrong with a damaged checkpoint, instead of raising it.
        """
        checkpoint = Checkpoint.open(folder, with_sharded=True)
        verify = partial(checkpoint.verify, here.index(self._ranks.rank), len(here))
        try:
            return _Attempt(checkpoint, read_verified(partial(read, checkpoint), verify))
        except DamagedCheckpointError as error:
            if not keeps_damage:
                raise
            return _Attempt(checkpoint, None, str(error))

    def _find(self, input_dir: str | os.PathLike[str] | None) -> Path:
        """The folder to load from, on process 0, where an interrupted save of it has been finished."""
        project = self._accelerator.project_configuration
        if input_dir is None:
            if project.project_dir is None and not project.automatic_checkpoint_naming:
                raise ValueError("load_state() needs a folder: pass input_dir, or Accelerator(project_dir=...).")
            checkpoint, self._passed_over = find_newest(checkpoints_folder(project.project_dir), self._skipped)
            return checkpoint.folder
        folder = Path(input_dir).expanduser()
        recover(folder)
        return folder

    def _folder_here(self, named: Path) -> tuple[Path, list[int]]:
        """The folder that the processes of this machine load from, and their ranks.

        It is the folder of the machine's first process, which has saved there, even if each process was passed its own name.
        """
        ranks = self._ranks
        seen = ranks.together("look at the checkpoint", lambda: self._recover(named))
        first = ranks.rank - ranks.local_rank
        here = [rank for rank, (local, _) in enumerate(seen) if rank - local == first]
        return (named if seen[ranks.rank][1] == seen[first][1] else Path(seen[first][1])), here

    def _recover(self, folder: Path) -> tuple[int, str]:
        """Finish an interrupted save on machines with their own file system. Returns the local rank and the folder."""
        if self._ranks.local_rank == 0 and not self._ranks.is_main:
            recover(folder)
        return self._ranks.local_rank, os.path.abspath(folder)

    def _continue_numbering(self) -> None:
        project = self._accelerator.project_configuration
        if project.project_dir is not None:
            last = [number for number, _ in numbered_checkpoints(checkpoints_folder(project.project_dir))][-1:]
            project.iteration = max(project.iteration, *(number + 1 for number in last), 0)


def _warn_of_unprepared_models(checkpoint: Checkpoint) -> None:
    """Warn that weights were not loaded, because there is no prepared model that could get them."""
    if any(name.startswith((SAFE_MODEL_NAME, MODEL_NAME)) for name in checkpoint.names):
        warn_user(
            f"load_state: the checkpoint {os.fspath(checkpoint.folder)} holds a model, but none is prepared, so no weights were loaded. "
            "Call accelerator.prepare(model, optimizer, ...) first, then load_state()."
        )


def _warn_of_other_world_size(checkpoint: Checkpoint, num_processes: int) -> None:
    """Warn what cannot be restored when the number of processes has changed."""
    saved = checkpoint.world_size
    if saved == num_processes:
        _warn_of_absent(checkpoint)
    if saved in (0, num_processes):
        return
    first, last = sorted((saved, num_processes))
    ranks = f"process {first}" if last - first == 1 else f"processes {first} to {last - 1}"
    effect = (
        f"there are no RNG states for {ranks}" if num_processes > saved else f"the RNG states of {ranks} are not used"
    )
    warn_user(
        f"The checkpoint {os.fspath(checkpoint.folder)} was saved with num_processes={saved} and is loaded with "
        f"num_processes={num_processes}: {effect}. Weights, optimizers and schedulers are restored completely. To keep the "
        "global batch size, change the batch size per process."
    )


def _warn_of_absent(checkpoint: Checkpoint) -> None:
    """Warn on which ranks RNG states are missing because the main process saved alone."""
    manifest = checkpoint.manifest
    absent = [rank for rank in manifest.absent if not added_by(checkpoint.folder, manifest, rank)] if manifest else []
    if absent:
        warn_user(
            f"The checkpoint {os.fspath(checkpoint.folder)} was saved by the main process alone, and has no RNG states for "
            f"processes {', '.join(map(str, absent))}. Everything else is complete. Call save_state() on all processes to save "
            "their RNG states, too."
        )


KEYS_OF_ALL_SCHEDULERS = frozenset({"base_lrs", "last_epoch", "verbose"})
NUMBERS_OF_SCALERS = ("scale", "growth_factor", "backoff_factor", "growth_interval")


def check_objects(checkpoint: Checkpoint, receivers: Receivers, state: TrainingState) -> None:
    """Check that what was read fits the objects of this run, before any of them changes.

    Registered objects other than plain modules are not checked: only loading shows what they accept.

    Raises:
        ValueError: Naming the file and what does not fit.
    """
    for scheduler, state_dict in zip(receivers.schedulers, state.schedulers, strict=True):
        _warn_of_another_scheduler(scheduler, state_dict)
    for index, order in state.samplers.items():
        if order is not None:
            _check_order(order, str(checkpoint.path(numbered(f"{SAMPLER_NAME}.bin", index))))
    if state.scaler:
        for name in NUMBERS_OF_SCALERS:
            if not isinstance(state.scaler.get(name), Number):
                raise ValueError(
                    f"{checkpoint.path(SCALER_NAME)} is damaged: its {name!r} is {state.scaler.get(name)!r}, not a number. "
                    "Load another checkpoint."
                )
    for index, (obj, state_dict) in enumerate(zip(receivers.custom, state.custom, strict=True)):
        if _was_compared(obj):
            where = checkpoint.path(custom_object_file(index))
            if not isinstance(state_dict, Mapping):
                raise ValueError(f"{where} holds a {type(state_dict).__name__}, not the state dict of a module.")
            check_values(
                obj, state_dict, f"The values in {where} do not fit the registered object {index}", strict=True
            )


def _check_order(order: Mapping[str, Any], where: str) -> None:
    for name in ("iteration", "initial_seed", "epoch"):
        if type(order.get(name, 0)) is not int or "iteration" not in order:
            raise ValueError(
                f"{where} is damaged: {name!r} is {order.get(name)!r}, not an int. Load another checkpoint."
            )
    if "position" in order:
        try:
            EpochPosition.from_state(order["position"])
        except ValueError as error:
            raise ValueError(f"{where} is damaged: {error}") from None


def _warn_of_another_scheduler(scheduler: Any, state_dict: Mapping[str, Any]) -> None:
    """Warn that a scheduler loads the state of another kind of scheduler: torch's load whatever has the same name."""
    current_keys = {name for name in scheduler.state_dict() if not name.startswith("_")}
    saved = {name for name in state_dict if isinstance(name, str) and not name.startswith("_")}
    lacking, surplus = current_keys - saved - KEYS_OF_ALL_SCHEDULERS, saved - current_keys - KEYS_OF_ALL_SCHEDULERS
    if lacking and surplus:
        kind = type(getattr(scheduler, "scheduler", scheduler)).__name__
        warn_user(
            f"The checkpoint holds the state of another scheduler than {kind}: it has "
            f"{', '.join(map(repr, sorted(surplus)))} and lacks {', '.join(map(repr, sorted(lacking)))}. Only values with the "
            "same names are loaded. To start the scheduler from its beginning, do not pass it to prepare()."
        )


@contextmanager
def naming_what_was_loaded() -> Iterator[list[str]]:
    """A block that appends to a list what it begins to load; an error that ends it gets a note that names this."""
    loaded: list[str] = []
    try:
        yield loaded
    except BaseException as error:
        if loaded:
            error.add_note(
                f"Loaded before this error, the last one perhaps in part: {', '.join(loaded)}. The rest did not change. Call "
                "load_state() again before training goes on."
            )
        raise


def apply_objects(receivers: Receivers, state: TrainingState, loaded: list[str]) -> None:
    """Load the states of all objects, those of the program first; each is appended to `loaded` before."""
    for index, (obj, state_dict) in enumerate(zip(receivers.custom, state.custom, strict=True)):
        loaded.append(f"registered object {index} ({type(obj).__name__})")
        obj.load_state_dict(state_dict)
    for index, (scheduler, state_dict) in enumerate(zip(receivers.schedulers, state.schedulers, strict=True)):
        loaded.append(f"scheduler {index}")
        scheduler.load_state_dict(state_dict)
    if state.scaler is not None:
        loaded.append("loss scaler")
        receivers.scaler.load_state_dict(state.scaler)
    for index, loader in enumerate(receivers.dataloaders):
        loaded.append(f"data loader {index}")
        if state.samplers.get(index) is not None:
            restore_order(loader, state.samplers[index])
        if index in state.positions:
            loader.load_state_dict(state.positions[index])
        restore_reading(loader, state.reading.get(index, {}))


def _was_compared(obj: Any) -> bool:
    """Whether an object is a module whose `load_state_dict` depends on nothing but names and shapes."""
    return isinstance(obj, nn.Module) and not loads_itself(obj)


def apply_random_states(states: dict[str, Any] | None) -> None:
    """Restore RNG states, last of all and all or none. Those of other hardware only cause a warning."""
    if states is None:
        return
    # Restoring stops at the first generator that does not fit, after it has changed those before it.
    before = capture_rng_state()
    try:
        restore_rng_state(states)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        restore_rng_state(before)
        warn_user(
            f"The RNG states of the checkpoint were not restored, because they do not fit this machine or are of another "
            f"version ({error}). The random number generators keep their current states."
        )
