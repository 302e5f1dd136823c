"""`CheckpointKeeper`: saves and loads the training state of an accelerator."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_state.logging import get_logger
from accel_state.warning import warn_user
from accelerate.checkpoint.agreement import Ranks, find_storage
from accelerate.checkpoint.alone import begin_call, outcome_of, publishing_outcome, warn_of_saving_alone
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.naming import (
    checkpoints_folder,
    living_writer,
    numbered_checkpoints,
    remove_leftovers,
    remove_oldest,
)
from accelerate.checkpoint.restore import StateLoader, schedulers_with_files
from accelerate.checkpoint.save import write_custom_object, write_own_state, write_shared_state
from accelerate.checkpoint.transaction import FileWriter, FolderWriter, Transaction
from accelerate.checkpoint.window import write_window

if TYPE_CHECKING:
    from accel_integrations.checkpoints.pending import FileWriter, PendingSave
    from accelerate.checkpoint.attendance import Call
    from accelerate.checkpoint.run import Run

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]

logger = get_logger(__name__)


class CheckpointKeeper:
    """Saves and loads the training state of one accelerator.

    Args:
        accelerator: The accelerator whose prepared and registered objects are saved.
    """

    def __init__(self, accelerator: Run) -> None:
        self._accelerator = accelerator
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

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
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Write a checkpoint with all processes; see `Accelerator.save_state`."""
        accelerator = self._accelerator
        folder, is_automatic = self._target(output_dir)
        call = begin_call("save_state", accelerator, {"iteration": accelerator.project_configuration.iteration})
        if call is not None and is_automatic:  # the main process may have saved alone before
            accelerator.project_configuration.iteration = call.facts["iteration"]
            folder = folder.with_name(f"checkpoint_{call.facts['iteration']}")
        if call is None or call.everyone:
            return self._save(
                folder, is_automatic, Ranks(accelerator.state), safe_serialization, save_model_func_kwargs
            )[0]
        if accelerator.state.process_index > 0:
            return self._add_own_state(call, folder)
        with publishing_outcome(call) as outcome:
            ranks = Ranks(accelerator.state, alone=True)
            saved, outcome["token"] = self._save(
                folder, is_automatic, ranks, safe_serialization, save_model_func_kwargs
            )
            outcome["folder"] = os.path.abspath(saved)
        warn_of_saving_alone(call, saved)
        return saved

    def _save(
        self, folder: Path, is_automatic: bool, ranks: Ranks, safe_serialization: bool, options: dict[str, Any]
    ) -> tuple[Path, str]:
        """Write a checkpoint on the processes that take part.

        Returns:
            Its folder, and the token that the other ranks write into files that they add later.
        """
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        target = Path(os.path.abspath(folder))
        storage = find_storage(ranks, target)
        ranks.together(
            "use one folder on all ranks", lambda: accelerator.engine.check_storage(storage.owner == 0, target)
        )
        if is_automatic:
            ranks.together("make room for a checkpoint", lambda: self._make_room(target) if storage.is_owner else None)
        logger.info("Saving the training state to %s", folder)
        with Transaction(ranks, storage, target) as transaction:
            is_writer = storage.writes_shared(project.save_on_each_node)
            pending = self._collect(ranks, transaction.folder, options, is_writer)
            transaction.write(lambda files: self._write(files, pending, is_writer, safe_serialization))
            transaction.publish(accelerator.step, project.iteration)
        project.iteration += 1
        if is_automatic and storage.is_owner and project.total_limit is not None:
            _remove_surplus(target, project.total_limit)
        return folder, transaction.token

    def _add_own_state(self, call: Call, folder: Path) -> Path:
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
        write_window(FolderWriter(published), accelerator)
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
        write_window(files, accelerator)
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
        loader = StateLoader(self._accelerator, list(self._load_hooks.values()))
        loader.load(input_dir, load_kwargs, **load_model_func_kwargs)


def _remove_surplus(newest: Path, total_limit: int) -> None:
    """Remove checkpoints beyond the limit. The new one is published already, so a failure only causes a warning."""
    try:
        removed = remove_oldest(newest, total_limit)
    except OSError as error:
        warn_user(
            f"Old checkpoints beyond total_limit={total_limit} could not be removed ({error}). Remove them by hand."
        )
    else:
        if removed:
            logger.info("Removed %s", ", ".join(map(str, removed)))
