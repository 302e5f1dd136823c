"""What a short run leaves out, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.short_run import choose

ALWAYS = ["a.py::test_always[0]", "a.py::test_always[1]"]
SAMPLED = [f"a.py::test_sampled[{number}]" for number in range(10)]
FEW = ["b.py::test_sampled[only]"]
THOROUGH = ["a.py::test_thorough"]
HALF = ["a.py::test_half[0]", "a.py::test_half[1]"]  # a sample of one, the first of which is thorough
NAMED = ["a.py::test_named", "b.py::test_named"]
TURNS = ["a.py::test_first", "a.py::test_second[0]", "a.py::test_second[1]", "b.py::test_alone"]


class Item:
    """As much of a collected test as the choice looks at."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid

    def get_closest_marker(self, name: str) -> Any:
        """The marker of the test that its name stands for."""
        marked = {"sample": SAMPLED + FEW + HALF, "thorough": THOROUGH + HALF[:1], "takes_turns": TURNS + NAMED}[name]
        if self.nodeid not in marked:
            return None
        if name == "takes_turns":
            return (pytest.mark.takes_turns("together") if self.nodeid in NAMED else pytest.mark.takes_turns).mark
        return pytest.mark.sample(1 if self.nodeid in HALF else 3).mark


def names(seed: int) -> tuple[list[str], list[str]]:
    items: Any = [
        Item(nodeid) for nodeid in [*SAMPLED[:5], *THOROUGH, *ALWAYS, *FEW, *TURNS, *NAMED, *HALF, *SAMPLED[5:]]
    ]
    short, left = choose(items, seed)
    return [item.nodeid for item in short], [item.nodeid for item in left]


def test_a_sample_and_everything_that_is_not_marked_run() -> None:
    short, left = names(seed=1)
    assert len(set(short) & set(SAMPLED)) == 3
    assert set(ALWAYS + FEW) < set(short)
    assert {*THOROUGH, HALF[0]} < set(left)
    assert HALF[1] in short, "what is thorough is not drawn instead of what may run"
    assert len(short) + len(left) == 22


def test_tests_of_a_file_take_turns() -> None:
    first, second, alone = {TURNS[0]}, set(TURNS[1:3]), set(TURNS[3:])
    seen = [set(names(seed)[0]) & set(TURNS) for seed in range(40)]
    assert all(turn in (first | alone, second | alone) for turn in seen)
    assert first | alone in seen
    assert second | alone in seen


def test_tests_of_several_files_take_turns_under_a_name() -> None:
    seen = [set(names(seed)[0]) & set(NAMED) for seed in range(40)]
    assert all(len(turn) == 1 for turn in seen)
    assert set.union(*seen) == set(NAMED)


def test_the_seed_decides() -> None:
    assert names(seed=1) == names(seed=1)
    seen = {name for seed in range(40) for name in names(seed)[0]}
    assert set(SAMPLED) < seen, "in time, every one of them is run"
