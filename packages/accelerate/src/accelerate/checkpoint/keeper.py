"""`CheckpointKeeper`: saves and loads the training state of an accelerator."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_integrations.finite import has_finite_weights
from accel_integrations.training_state.interface import FolderWriter
from accel_integrations.training_state.snapshot import HostBuffers, Snapshot
from accel_integrations.training_state.window import write_window
from accel_ops.collectives.agreement import Ranks, find_storage
from accel_ops.collectives.participants import begin_call, outcome_of, participants, publishing_outcome
from accel_ops.collectives.store_gather import StoreGather, has_store
from accel_state.logging import get_logger
from accel_state.warning import warn_user
from accel_state.weak import Weak
from accelerate.checkpoint.background import BackgroundSave, BackgroundSaves, finished_save
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.naming import (
    checkpoints_folder,
    living_writer,
    number_after,
    numbered_checkpoints,
    remove_leftovers,
    remove_oldest,
)
from accelerate.checkpoint.transaction import Transaction
from accelerate.checkpoint.writing import (
    schedulers_with_files,
    write_custom_object,
    write_own_state,
    write_shared_state,
)

if TYPE_CHECKING:
    from accel_integrations.training_state.interface import FileWriter, PendingSave
    from accel_ops.collectives.participants import JoinedCall
    from accelerate.interface import AcceleratorInterface

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Order:
    """One call of `save_state`.

    Attributes:
        folder: Where the checkpoint will be.
        is_automatic: Whether its name is automatic.
        safe_serialization: Whether weights are written as safetensors.
        in_background: Whether it is written while training continues.
        options: For the engine.
    """

    folder: Path
    is_automatic: bool
    safe_serialization: bool
    in_background: bool
    options: Mapping[str, Any]


@dataclass(frozen=True)
class _Begun:
    """A checkpoint whose states are collected and not written yet.

    Attributes:
        transaction: Of its files.
        target: Where it will be.
        write: Writes what this rank has to write.
        step: For its manifest.
        iteration: For its manifest.
        finite: For its manifest.
        total_limit: How many checkpoints are kept, if this process removes the others.
        first_number: Of the checkpoints that count.
    """

    transaction: Transaction
    target: Path
    write: Callable[[FileWriter], None]
    step: int
    iteration: int
    finite: bool
    total_limit: int | None
    first_number: int

    def complete(self, write: Callable[[FileWriter], None]) -> None:
        """Write its files, publish it, and remove old ones."""
        self.transaction.write(write)
        self.transaction.publish(self.step, self.iteration, self.finite)
        if self.total_limit is not None:
            _remove_surplus(self.target, self.total_limit, self.first_number)


class CheckpointKeeper:
    """Saves and loads the training state of one accelerator.

    Args:
        accelerator: The accelerator whose prepared and registered objects are saved; it owns this object.
    """

    def __init__(self, accelerator: AcceleratorInterface) -> None:
        self._owner = Weak(accelerator)
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._saves = BackgroundSaves()
        self._buffers = HostBuffers()
        self._last_iteration: int | None = None
        self._first_number = 0  # of this run's checkpoints; those of an earlier run are not counted for `total_limit`

    @property
    def _accelerator(self) -> AcceleratorInterface:
        return self._owner.get()

    # ---- hooks --------------------------------------------------------------------------------------------------

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have `hook(models, weights, output_dir)` called before `save_state` writes; it may pop from `weights`.

        `output_dir` is the staging folder of the checkpoint; files that the hook writes there become part of it.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have `hook(models, input_dir)` called before `load_state` loads; it may pop from `models`."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    # ---- saving -------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path | BackgroundSave:
        """Write a checkpoint with all processes; see `Accelerator.save_state`."""
        accelerator = self._accelerator
        self._wait_for_last()
        folder, is_automatic = self._target(output_dir)
        facts = {"iteration": accelerator.project_configuration.iteration}
        engine = accelerator.engine
        sharded_by = None if engine.is_replicated else engine.name
        # Find out who has called: the main process may save alone, if the others do not come within its patience.
        call = begin_call("save_state", accelerator.state, facts, sharded_by=sharded_by)
        if call is not None and is_automatic:  # the main process may have saved alone before
            accelerator.project_configuration.iteration = call.facts["iteration"]
            folder = folder.with_name(f"checkpoint_{call.facts['iteration']}")
        order = _Order(folder, is_automatic, safe_serialization, async_save, save_model_func_kwargs)
        if call is None or call.everyone:
            return self._save(order, Ranks(accelerator.state))
        if accelerator.state.process_index > 0:
            self._saves.check()
            added = self._add_own_state(call, folder)
            return finished_save(added) if async_save else added
        saved = self._save(order, Ranks(accelerator.state, alone=True), call)
        _warn_of_saving_alone(call, saved)
        return saved

    def _save(self, order: _Order, ranks: Ranks, alone: JoinedCall | None = None) -> Path | BackgroundSave:
        """Write a checkpoint on the processes that take part.

        Args:
            order: What to write, and where.
            ranks: The processes.
            alone: The call that the main process makes without the others, whose outcome it publishes for them.

        Returns:
            The folder, or the save that goes on in the background.
        """
        with ExitStack() as stack:
            outcome = stack.enter_context(publishing_outcome(alone)) if alone is not None else {}
            order = self._numbered(order, ranks)
            begun = self._begin(order, ranks, stack)

            def complete(write: Callable[[FileWriter], None]) -> None:
                begun.complete(write)
                outcome.update(token=begun.transaction.token, folder=os.fspath(begun.target))

            if not order.in_background or not _can_agree_in_background(ranks):
                complete(begun.write)
                self._accelerator.project_configuration.iteration += 1
                return finished_save(order.folder) if order.in_background else order.folder
            # The copy is taken before this call returns, because the next step of the program changes what is copied.
            snapshot = ranks.each("copy the states", lambda: self._copy(begun))
            gather = StoreGather(begun.transaction.key) if ranks.count > 1 else None
            # The thread takes the transaction over: leaving this block would discard what it has yet to write.
            rest = stack.pop_all()

        def complete_in_thread() -> None:
            with ExitStack() as end:
                if gather is not None:
                    end.callback(gather.leave)
                agreeing = ranks if gather is None else ranks.agreeing_by(gather)
                begun.transaction.continue_in_thread(agreeing)
                end.enter_context(rest)
                snapshot.write_shards(agreeing)
                complete(snapshot.write)

        self._accelerator.project_configuration.iteration += 1
        self._last_iteration = begun.iteration
        return self._saves.start(order.folder, complete_in_thread)

    def _begin(self, order: _Order, ranks: Ranks, stack: ExitStack) -> _Begun:
        """Begin a checkpoint: collect the states of models and optimizers, and write nothing but what hooks write.

        Args:
            order: What to write, and where.
            ranks: The processes that take part.
            stack: Gets the transaction, whose end discards what was not published.
        """
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        target = Path(os.path.abspath(order.folder))
        storage = find_storage(ranks, target)

        def check() -> bool:
            self._saves.check()
            accelerator.engine.check_storage(storage.owner == 0, target)
            return all(map(has_finite_weights, accelerator._models))

        finite = all(ranks.together(f"begin the checkpoint {target}", check))
        if order.is_automatic:
            ranks.together("make room for a checkpoint", lambda: self._make_room(target) if storage.is_owner else None)
        logger.info("Saving the training state to %s", order.folder)
        transaction = stack.enter_context(Transaction(ranks, storage, target))
        is_writer = storage.writes_shared(project.save_on_each_node)
        pending = self._collect(ranks, transaction.folder, order.options, is_writer)
        return _Begun(
            transaction,
            target,
            write=lambda files: self._write(files, pending, is_writer, order.safe_serialization),
            step=accelerator.step,
            iteration=project.iteration,
            finite=finite,
            total_limit=project.total_limit if order.is_automatic and storage.is_owner else None,
            first_number=self._first_number,
        )

    def _numbered(self, order: _Order, ranks: Ranks) -> _Order:
        """Number on after the checkpoints of an earlier run that this one does not continue; none of them is replaced or removed."""
        project = self._accelerator.project_configuration
        if not order.is_automatic or project.iteration > 0:
            return order
        folder = order.folder.parent
        first = ranks.on_main("number the checkpoint", lambda: number_after(folder))
        if first == 0:
            return order
        project.iteration = self._first_number = first
        if self._accelerator.state.is_main_process:
            warn_user(
                f"{folder} holds checkpoints of an earlier run, up to checkpoint_{first - 1}. This run did not load one, so it numbers on "
                f"from checkpoint_{first} and leaves them as they are; total_limit counts its own. Call load_state() before training to "
                "continue that run, or give each run a project_dir of its own."
            )
        return replace(order, folder=folder / f"checkpoint_{first}")

    def _copy(self, begun: _Begun) -> Snapshot:
        """Copy everything that this rank would write now."""
        self._buffers.begin()
        snapshot = Snapshot(begun.transaction.folder, self._buffers)
        begun.write(snapshot)
        self._buffers.end()
        if snapshot.adopted and self._accelerator.state.is_main_process:
            warn_user(
                f"save_state(async_save=True): the {self._accelerator.engine.name!r} engine writes its states itself, before "
                "training continues. Only checksums, fsync and publishing are left to the background."
            )
        return snapshot

    def _wait_for_last(self) -> None:
        """Wait until the last background save has ended. If it failed, its number is free again."""
        project, last = self._accelerator.project_configuration, self._last_iteration
        if self._saves.has_failed() and last is not None and project.iteration == last + 1:
            project.iteration = last
        self._last_iteration = None

    def finish(self) -> None:
        """Wait until the last background save has ended, and free the memory of the copies.

        Raises:
            Exception: It failed, and nobody has seen the error.
        """
        self._buffers = HostBuffers()
        self._saves.check()

    def _add_own_state(self, call: JoinedCall, folder: Path) -> Path:
        """Add this rank's RNG states to a checkpoint that the main process wrote without it."""
        accelerator = self._accelerator
        outcome = outcome_of(call, "save_state")
        if "error" in outcome:
            raise RuntimeError(f"save_state() failed on the main process: {outcome['error']}")
        if not outcome:
            return folder  # the process group has ended
        accelerator.project_configuration.iteration += 1
        published = Path(outcome["folder"])
        manifest = Manifest.read(published)
        if manifest is None or manifest.token != outcome["token"]:
            warn_user(
                f"save_state() on process {accelerator.state.process_index} was called after {published} was written, and could "
                "not add its RNG states: this process does not see that checkpoint, or it has been replaced since."
            )
            return folder
        write_window(FolderWriter(published), accelerator.engine, accelerator._models, accelerator.state.process_index)
        write_own_state(
            FolderWriter(published),
            accelerator._dataloaders,
            accelerator.state.process_index,
            accelerator.step,
            token=manifest.token,
        )
        return folder

    def _target(self, output_dir: str | os.PathLike[str] | None) -> tuple[Path, bool]:
        """The folder to write, and whether its name is automatic."""
        project = self._accelerator.project_configuration
        if output_dir is not None and not project.automatic_checkpoint_naming:
            return Path(output_dir).expanduser(), False
        if output_dir is not None:
            warn_user(
                f"save_state({os.fspath(output_dir)!r}) ignores its folder and writes under an automatic name, because "
                "automatic_checkpoint_naming=True. Call it without a folder, or set automatic_checkpoint_naming=False."
            )
        elif project.project_dir is None and not project.automatic_checkpoint_naming:
            raise TypeError("save_state() needs a folder: pass output_dir, or Accelerator(project_dir=...).")
        return checkpoints_folder(project.project_dir) / f"checkpoint_{project.iteration}", True

    def _make_room(self, target: Path) -> None:
        """Raise if an automatic name is taken, and clean up after killed runs."""
        if target.exists():
            if (owner := living_writer(target)) is not None:
                raise ValueError(
                    f"save_state: {target} was written by another job that may still run ({owner}). Give each job a "
                    "project_dir of its own, or set ProjectConfiguration(iteration=...)."
                )
            raise ValueError(
                f"save_state: {target} already exists. Call load_state() first to continue that run, set "
                "ProjectConfiguration(iteration=...), or remove it."
            )
        remove_leftovers(target.parent)
        later = [path.name for _, path in numbered_checkpoints(target.parent)][-1:]
        if later and numbered_checkpoints(target.parent)[-1][0] > self._accelerator.project_configuration.iteration:
            warn_user(
                f"{target.parent} already holds {later[0]!r} of an earlier run. load_state() would load that one instead of "
                f"{target.name!r}. Call load_state() first to continue that run, or set ProjectConfiguration(iteration=...)."
            )

    def _collect(self, ranks: Ranks, folder: Path, options: Mapping[str, Any], is_writer: bool) -> PendingSave:
        """The states of models and optimizers, as hooks have left them; full ones on ranks that write them."""
        accelerator = self._accelerator

        def collect() -> PendingSave:
            with accelerator.engine.keeping_full_states(is_writer):
                pending = accelerator.engine.save(options)
            # Hooks see the weights that were collected, and may change or remove them before anything is written.
            for hook in list(self._save_hooks.values()):
                hook(accelerator._models, pending.weights, os.fspath(folder))
            return pending

        return ranks.each("collect the weights", collect)

    def _write(self, files: FileWriter, pending: PendingSave, is_writer: bool, safe_serialization: bool) -> None:
        accelerator = self._accelerator
        pending.write(files, is_writer=is_writer, safe_serialization=safe_serialization)
        if is_writer:
            scale = accelerator.engine.precision.state_dict()
            write_shared_state(files, schedulers_with_files(accelerator), accelerator._dataloaders, scale)
            for index, obj in enumerate(accelerator._custom_objects):
                write_custom_object(files, obj, index)
        write_window(files, accelerator.engine, accelerator._models, accelerator.state.process_index)
        write_own_state(files, accelerator._dataloaders, accelerator.state.process_index, accelerator.step)

    # ---- loading ------------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Load the newest checkpoint of the project, if there is one; see `Accelerator.resume`."""
        project_dir = self._accelerator.project_configuration.project_dir
        if project_dir is None:
            raise ValueError("resume() needs to know where checkpoints are: pass Accelerator(project_dir=...).")
        folder = checkpoints_folder(project_dir)
        ranks = Ranks(self._accelerator.state)
        if not ranks.on_main("look for checkpoints", lambda: bool(numbered_checkpoints(folder))):
            return False
        self.load_state()
        return True

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Verify a checkpoint and load it, on all processes or none; see `Accelerator.load_state`."""
        self._wait_for_last()
        Ranks(self._accelerator.state).together("finish the checkpoint before", self._saves.check)
        from accelerate.checkpoint.restore import StateLoader

        loader = StateLoader(self._accelerator, list(self._load_hooks.values()))
        loader.load(input_dir, load_kwargs, **load_model_func_kwargs)


def _can_agree_in_background(ranks: Ranks) -> bool:
    """Whether these processes can agree without collectives; warns if they cannot."""
    if ranks.count == 1 or has_store():
        return True
    if ranks.is_main:
        warn_user(
            "save_state(async_save=True) writes at once: these processes have no key-value store through which they "
            "could agree while training continues."
        )
    return False


def _remove_surplus(newest: Path, total_limit: int, first_number: int) -> None:
    """Remove checkpoints beyond the limit. The new one is published already, so a failure only causes a warning."""
    try:
        removed = remove_oldest(newest, total_limit, first_number)
    except OSError as error:
        warn_user(
            f"Old checkpoints beyond total_limit={total_limit} could not be removed ({error}). Remove them by hand."
        )
    else:
        if removed:
            logger.info("Removed %s", ", ".join(map(str, removed)))


def _warn_of_saving_alone(call: JoinedCall, folder: os.PathLike[str]) -> None:
    """Warn, once per process group, what a checkpoint lacks that the main process saved alone."""
    notes = participants()
    if notes is not None and notes.has_warned:
        return
    if notes is not None:
        notes.has_warned = True
    waited = f", for which it waited {call.waited:.0f} s" if call.waited >= 1 else ""
    warn_user(
        f"save_state() was called on the main process without the others{waited}. {os.fspath(folder)} lacks their RNG "
        "states and the positions of their data loaders. Call save_state() on all processes to save these, too."
    )
