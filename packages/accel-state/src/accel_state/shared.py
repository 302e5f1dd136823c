"""The dictionary that all instances of a state share."""

from __future__ import annotations

import threading
from typing import Any

from accel_state.libraries import is_torch_xla_available


class ThreadLocalSharedDict(threading.local):
    """Class attribute that gives every thread a dictionary of its own: on TPUs one thread drives each core.

    Args:
        thread_local: Kept for callers that pass it; has no effect.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value


SharedDict: type = ThreadLocalSharedDict if is_torch_xla_available() else dict
