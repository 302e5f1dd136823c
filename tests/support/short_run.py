"""Which tests a run without paths, and without `--all`, leaves out.

Every promise is touched by a short run. What costs seconds and says more of the same is marked:

- `@pytest.mark.sample(n)`: of the parameter sets of a test, `n` run, chosen by the seed that the header shows;
- `@pytest.mark.thorough`: runs with `--all` only.

A run that names files or folders runs all that is in them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest


def choose(items: Sequence[pytest.Item], seed: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide collected tests.

    Args:
        items: The tests, in the order in which they would run.
        seed: Decides which parameter sets of a sampled test run; the same seed chooses the same ones.

    Returns:
        Those of a short run and those that are left to `--all`, each in the given order.
    """
    sets: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            sets[_function(item)].append(item.nodeid)
    chosen: set[str] = set()
    for item in items:
        function = _function(item)
        if function in sets:
            marker = item.get_closest_marker("sample")
            assert marker is not None
            names = sorted(sets.pop(function))
            chosen.update(random.Random(f"{seed}{function}").sample(names, min(int(marker.args[0]), len(names))))
    short, left = [], []
    for item in items:
        is_left = item.get_closest_marker("thorough") or (
            item.get_closest_marker("sample") and item.nodeid not in chosen
        )
        (left if is_left else short).append(item)
    return short, left


def _function(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]
