"""Which tests one worker of a parallel run takes as a whole, because they share what is expensive to start.

The tests of a file share its imports and fixtures; those that run on ranks share the pool of ranks, and what each rank
has imported; those on a pretended machine with GPUs share that machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[2]
RANKS = ("@ranks(", "@deepspeed_ranks(", "POOL.run(")
MACHINES = ("tests/cuda_shapes/", "tests/gpu/test_scenarios_elsewhere.py")
LAUNCHES = ("pytest.mark.launch", "subprocess.run(")


@cache
def family_of(file: str) -> str:
    """The family of the tests of a file: a name that all of its files share.

    Args:
        file: Its path from the repository's root, with slashes.
    """
    if file.startswith(MACHINES):
        return "pretended machine"
    return "ranks" if _mentions(file, RANKS) else file


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests, long families first, so that the workers end together."""
    return sorted(items, key=lambda item: _place(file_of(item.nodeid)))


def _place(file: str) -> int:
    family = family_of(file)
    return 0 if family == "ranks" else 1 if family != file else 2 if _mentions(file, LAUNCHES) else 3


@cache
def _mentions(file: str, words: tuple[str, ...]) -> bool:
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" and path.is_file() else ""
    return any(word in text for word in words)


def file_of(nodeid: str) -> str:
    """The file of a test, from the repository's root."""
    return nodeid.partition("::")[0]


class FamilyScheduling(LoadScopeScheduling):
    """Hands out families of tests."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False  # the number of its tests does not show how long a family takes
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return family_of(file_of(nodeid))
