"""Which errors mean that a service cannot be reached, whatever library met them."""

from __future__ import annotations

import socket

NAMES = frozenset({"CommError", "ConnectionError", "ConnectTimeout", "ConnectError", "NewConnectionError",
                   "MaxRetryError", "NameResolutionError", "ReadTimeout", "Timeout", "TimeoutException"})  # fmt: skip
"""Error classes of HTTP libraries and trackers, by name: recognised without importing any of them."""


def is_network_failure(error: BaseException) -> bool:
    """Whether an error, or what caused it, is a failure to reach another machine."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror, socket.herror)):
            return True
        if any(kind.__name__ in NAMES for kind in type(error).__mro__):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False
