"""What a test may not leave behind: shared states, process groups, environment variables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

SHARED_STATES = {
    "accel_state.processes": "PartialState",
    "accel_state.accelerator_state": "AcceleratorState",
    "accel_state.gradient_state": "GradientState",
}


def reset_state() -> None:
    """Forget the process, accelerator and gradient states, if their modules were imported at all."""
    for module, name in SHARED_STATES.items():
        if module in sys.modules and hasattr(sys.modules[module], name):
            getattr(sys.modules[module], name)._reset_state()


def restore_environment(before: Mapping[str, str]) -> None:
    """Put `os.environ` back to what it was."""
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def leaked_process_group() -> bool:
    """True when a default process group is still alive in this process."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def gloo_threads(process: int) -> int:
    """How many gloo process groups of a process have a thread; 0 where threads are not listed, or have no names.

    Each wakes up a hundred times a second, also when nothing can use its group any more.

    Args:
        process: Its ID.
    """
    count = 0
    for name in Path(f"/proc/{process}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that ended just now
            count += name.read_text().startswith("gloo_tcp_loop")
    return count
