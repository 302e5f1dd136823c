"""What a short run leaves out, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.short_run import choose

ALWAYS = ["a.py::test_always[0]", "a.py::test_always[1]"]
SAMPLED = [f"a.py::test_sampled[{number}]" for number in range(10)]
FEW = ["b.py::test_sampled[only]"]
THOROUGH = ["a.py::test_thorough"]
TURNS = ["a.py::test_first", "a.py::test_second[0]", "a.py::test_second[1]", "b.py::test_alone"]


class Item:
    """As much of a collected test as the choice looks at."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid

    def get_closest_marker(self, name: str) -> Any:
        """The marker of the test that its name stands for."""
        marked = {"sample": SAMPLED + FEW, "thorough": THOROUGH, "takes_turns": TURNS}[name]
        return pytest.mark.sample(3).mark if self.nodeid in marked else None


def names(seed: int) -> tuple[list[str], list[str]]:
    items: Any = [Item(nodeid) for nodeid in [*SAMPLED[:5], *THOROUGH, *ALWAYS, *FEW, *TURNS, *SAMPLED[5:]]]
    short, left = choose(items, seed)
    return [item.nodeid for item in short], [item.nodeid for item in left]


def test_a_sample_and_everything_that_is_not_marked_run() -> None:
    short, left = names(seed=1)
    assert len(set(short) & set(SAMPLED)) == 3
    assert set(ALWAYS + FEW) < set(short)
    assert set(THOROUGH) < set(left)
    assert len(short) + len(left) == 18


def test_tests_of_a_file_take_turns() -> None:
    first, second, alone = {TURNS[0]}, set(TURNS[1:3]), set(TURNS[3:])
    seen = [set(names(seed)[0]) & set(TURNS) for seed in range(40)]
    assert all(turn in (first | alone, second | alone) for turn in seen)
    assert first | alone in seen
    assert second | alone in seen


def test_the_seed_decides() -> None:
    assert names(seed=1) == names(seed=1)
    seen = {name for seed in range(40) for name in names(seed)[0]}
    assert set(SAMPLED) < seen, "in time, every one of them is run"
