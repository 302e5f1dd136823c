"""Settings of a run's folders and checkpoint names."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.option import BOOLEAN, PATH, Kind, at_least, option, resolve_options
from accel_state.warning import warn_user


def _signal_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else value


def _are_signals(value: Any) -> bool:
    return isinstance(value, tuple) and all(name in HANDLED_SIGNALS for name in value)


HANDLED_SIGNALS = tuple(entry.name for entry in signal.Signals if entry.name not in ("SIGKILL", "SIGSTOP"))
SIGNALS = Kind('names of signals, such as ("SIGTERM",)', _signal_names, _are_signals, HANDLED_SIGNALS, _signal_names)


@known_as("accelerate.utils.dataclasses.ProjectConfiguration")
@guess_arguments
@dataclass
class ProjectConfiguration:
    """Folders of a run and the naming of its checkpoints.

    Args:
        project_dir (`str` or path, *optional*): Folder of the run.
        logging_dir (`str` or path, *optional*): Folder of tracker files; `project_dir` when left out.
        automatic_checkpoint_naming (`bool`): Whether `save_state()` writes to `checkpoints/checkpoint_<iteration>`
            below `project_dir`.
        total_limit (`int`, *optional*): How many automatically named checkpoints are kept; all when None.
        iteration (`int`): Number of the next checkpoint.
        save_on_each_node (`bool`): Whether the first process of every machine writes what one process would write
            otherwise; for machines without a common file system.
        save_on_signals (sequence of `str`): Signals such as `"SIGTERM"` after which training saves a checkpoint at the next step
            boundary, on all ranks, and exits.
        exit_code_after_signal (`int`): The exit code then; 75 says that it is worth trying again.
        iteration_checkpoints (`bool`, *optional*): Deprecated, use `automatic_checkpoint_naming`.
        save_every_n_steps (`int`, *optional*): Deprecated, and without effect: the loop calls `save_state()`.

    Example:
        ```python
        config = ProjectConfiguration("runs/digits", automatic_checkpoint_naming=True, total_limit=3)
        ```
    """

    project_dir: str | os.PathLike[str] | None = option(None, kind=PATH)
    logging_dir: str | os.PathLike[str] | None = option(None, kind=PATH)
    automatic_checkpoint_naming: bool = option(False, kind=BOOLEAN)
    total_limit: int | None = option(None, kind=at_least(1))
    iteration: int = option(0, kind=at_least(0))
    save_on_each_node: bool = option(False, kind=BOOLEAN)
    save_on_signals: Sequence[str] = option((), kind=SIGNALS)
    exit_code_after_signal: int = option(75, kind=at_least(1))
    iteration_checkpoints: InitVar[bool | None] = None
    save_every_n_steps: InitVar[int | None] = None

    def __post_init__(self, iteration_checkpoints: bool | None = None, save_every_n_steps: int | None = None) -> None:
        if iteration_checkpoints is not None:
            self.automatic_checkpoint_naming = iteration_checkpoints
            advice = f"automatic_checkpoint_naming={iteration_checkpoints!r}"
            warn_user(f"iteration_checkpoints is deprecated: use {advice}.", FutureWarning)
        if save_every_n_steps is not None:
            advice = f"call save_state() in the training loop, every {save_every_n_steps!r} steps"
            warn_user(f"save_every_n_steps saves nothing by itself: {advice}.", FutureWarning)
        resolve_options(self)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set `project_dir`, and `logging_dir` where it has no value yet."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
