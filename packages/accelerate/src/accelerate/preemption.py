"""Saving when a signal asks a run to end: at the next step boundary, on all ranks at the same one, then exit.

A signal arrives at a different moment on each rank, if it arrives on all. So the ranks agree with an all-reduce of one
byte per batch between hosts: it is started after a batch and looked at after the next one, so that nobody waits for it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_ops.collectives.transport import new_host_group
from accel_state.logging import get_logger
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.gradient_state import GradientState
    from accel_state.settings.project import ProjectConfiguration

logger = get_logger(__name__)


class SignalSaver:
    """Saves a checkpoint after a signal, and ends the process.

    Signals are handled from the moment this is made, in the main thread. A second one ends the process as if none was
    handled.

    Args:
        project: The names of the signals, the exit code, and the folder of the run.
        save: Saves a checkpoint and returns its folder; called on all ranks.
        state: The process state.
        gradient_state: Says whether an accumulation window is open.
        keeps_window: Whether an open one can be saved.

    Raises:
        ValueError: The run has no folder.
    """

    def __init__(
        self,
        project: ProjectConfiguration,
        save: Callable[[], str | os.PathLike[str]],
        state: AcceleratorState,
        gradient_state: GradientState,
        keeps_window: Callable[[], bool],
    ) -> None:
        if project.project_dir is None:
            raise ValueError(
                f"save_on_signals={project.save_on_signals!r} needs a folder to save into: pass ProjectConfiguration(project_dir=...)."
            )
        self._exit_code = project.exit_code_after_signal
        self._save = save
        self._state = state
        self._gradient_state = gradient_state
        self._keeps_window = keeps_window
        self._got = ""
        self._is_agreed = False
        self._group: Any = new_host_group(dist.group.WORLD) if state.num_processes > 1 else None
        self._answer: tuple[Any, torch.Tensor] | None = None
        if threading.current_thread() is not threading.main_thread():
            warn_user(
                "save_on_signals has no effect, because the Accelerator is made outside of the main thread, where Python handles "
                "no signals. Make it in the main thread."
            )
            return
        numbers = [signal.Signals[name] for name in project.save_on_signals]
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._got = signal.Signals(number).name
        for each, handler in self._before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)

    def after_batch(self) -> None:
        """Called by prepared loaders when the program has done with a batch: save and exit where all ranks do.

        Raises:
            SystemExit: After saving.
        """
        is_nested = len(self._gradient_state._dataloader_references_ref) > 2  # behind a leading None
        if is_nested or not torch.is_grad_enabled():  # an evaluation
            return
        self._is_agreed = self._is_agreed or self._agreed()
        if not self._is_agreed or not (self._gradient_state.sync_gradients or self._keeps_window()):
            return
        folder = self._save()
        if self._state.is_main_process:
            logger.warning(
                "Saved %s after %s, and exits with code %d. accelerator.resume() continues from there.",
                os.fspath(folder),
                self._got or "a signal to another rank",
                self._exit_code,
            )
        sys.exit(self._exit_code)

    def _agreed(self) -> bool:
        """Whether any rank had got a signal when all had done with the batch before."""
        if self._group is None:
            return bool(self._got)
        is_asked = False
        if self._answer is not None:
            work, flag = self._answer
            work.wait()
            is_asked = bool(flag.item())
        if not is_asked:
            flag = torch.tensor([bool(self._got)], dtype=torch.uint8)
            self._answer = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return is_asked
