"""Which tests a run without paths, and without `--all`, leaves out.

What is quick runs. What costs seconds, and says more of the same or of what its neighbours say, is marked:

- `@pytest.mark.sample(n)`: of the parameter sets of a test, `n` run, chosen by the seed that the header shows;
- `@pytest.mark.takes_turns`: of the tests of a file that are marked so, one runs, chosen by the seed as well;
- `@pytest.mark.takes_turns("ways to start")`: the same for tests of several files, which have the name in common;
- `@pytest.mark.thorough`: runs with `--all` only.

A run that names files or folders runs all that is in them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest

from tests.support.families import file_of

LONG, SHORT = 100, 25
"""Examples of a property test that does not say how many, in a run of everything and in a short one."""


def choose(items: Sequence[pytest.Item], seed: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide collected tests.

    Args:
        items: The tests, in the order in which they would run.
        seed: Decides which parameter sets of a sampled test run, and whose turn it is; the same seed chooses the same ones.

    Returns:
        Those of a short run and those that are left to `--all`, each in the given order.
    """
    sampled: dict[tuple[str, int], list[str]] = defaultdict(list)
    turns: dict[str, set[str]] = defaultdict(set)
    left = {item.nodeid for item in items if item.get_closest_marker("thorough")}
    for item in items:
        if item.nodeid in left:
            continue
        if (marker := item.get_closest_marker("takes_turns")) is not None:
            turns[marker.args[0] if marker.args else file_of(item.nodeid)].add(_function(item))
        if (marker := item.get_closest_marker("sample")) is not None:
            sampled[_function(item), int(marker.args[0])].append(item.nodeid)
    waiting = {name for those, names in turns.items() for name in names - {_one_of(sorted(names), f"{seed}{those}")}}
    left |= {item.nodeid for item in items if _function(item) in waiting}
    for (function, number), names in sampled.items():
        names.sort()
        left |= set(names) - set(random.Random(f"{seed}{function}").sample(names, min(number, len(names))))
    return [item for item in items if item.nodeid not in left], [item for item in items if item.nodeid in left]


def examples(number: int, **settings: Any) -> hypothesis.settings:
    """The settings of a property that is tried with so many examples, or a sixth of them in a short run."""
    is_short = hypothesis.settings.default.max_examples < LONG
    return hypothesis.settings(max_examples=number // 6 if is_short else number, deadline=None, **settings)


def values_of(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """What a parameter is in the tests of this run that are in the fixture's file."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return [item.callspec.params[parameter] for item in items if parameter in item.callspec.params]


def _one_of(names: Sequence[str], seed: str) -> str:
    return random.Random(seed).choice(names)


def _function(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]
