"""What a rehearsal does not do: saving and tracking. Each is said once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

SKIPPED = {  # owner -> methods or functions
    "accelerate.accelerator:Accelerator": (
        "save_state", "save_model", "save", "load_state", "init_trackers", "log", "end_training", "get_state_dict",
    ),
    "torch:": ("save",),
    "safetensors.torch:": ("save_file", "save_model"),
}  # fmt: skip


@contextmanager
def skipped_aloud(notes: list[str]) -> Iterator[None]:
    """A context in which nothing is saved or tracked.

    Args:
        notes: Gets a line for each function that the script called for it.
    """
    with ExitStack() as stack:
        for path, names in SKIPPED.items():
            module, _, owner = path.partition(":")
            if find_spec(module.partition(".")[0]) is None:
                continue
            where: Any = import_module(module)
            where = getattr(where, owner) if owner else where
            for name in names:
                title = f"{owner or module}.{name}"
                stack.enter_context(patch.object(where, name, _skip(title, notes)))
        yield


def _skip(title: str, notes: list[str]) -> Callable[..., dict[str, Any]]:
    def skip(*args: Any, **kwargs: Any) -> dict[str, Any]:
        note_once(notes, f"skipped: {title}")
        return {}

    return skip


def note_once(notes: list[str], line: str) -> None:
    """Add a line to the notes, unless they have it."""
    if line not in notes:
        notes.append(line)
