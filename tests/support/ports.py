"""Ports for tests that listen only later, in processes that they start."""

from __future__ import annotations

import contextlib
import random
import socket

LOWEST, HIGHEST = 15_000, 32_000  # below those that Linux gives to connections, of which tests make hundreds a second


def free_ports(number: int) -> list[int]:
    """Choose ports on which nobody listens.

    Args:
        number: How many; they differ.

    Returns:
        The ports. Nothing reserves them, but neither the system nor, likely, another test chooses them meanwhile.
    """
    generator = random.SystemRandom()  # the others give both workers of a run the same numbers
    with contextlib.ExitStack() as open_ones:
        actual: list[int] = []
        while len(actual) < number:
            probe = open_ones.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", generator.randrange(LOWEST, HIGHEST)))
                actual.append(probe.getsockname()[1])
        return actual
