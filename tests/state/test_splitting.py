"""Dividing inputs between processes."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.splitting import slice_of, split


@given(st.lists(st.integers()), st.integers(1, 7))
def test_parts_make_the_whole_in_order(inputs: list[int], num_processes: int) -> None:
    parts = [split(inputs, rank, num_processes) for rank in range(num_processes)]
    assert sum(parts, []) == inputs
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [len(part) for part in parts] == sorted(map(len, parts), reverse=True)
    assert split(tuple(inputs), num_processes - 1, num_processes) == tuple(parts[-1])


@given(st.lists(st.integers(-9, 9), min_size=1), st.integers(1, 7))
def test_padded_parts_are_equally_long_and_filled_with_the_last(inputs: list[int], num_processes: int) -> None:
    parts = [split(inputs, rank, num_processes, apply_padding=True) for rank in range(num_processes)]
    assert {len(part) for part in parts} == {-(-len(inputs) // num_processes)}
    for rank, part in enumerate(parts):
        positions = slice_of(len(inputs), rank, num_processes)
        assert part[: len(positions)] == inputs[positions.start : positions.stop]
        assert set(part[len(positions) :]) <= {inputs[-1]}
    tensors = [split(torch.tensor(inputs), rank, num_processes, apply_padding=True) for rank in range(num_processes)]
    assert [tensor.tolist() for tensor in tensors] == parts
    arrays = [split(np.array(inputs), rank, num_processes, apply_padding=True) for rank in range(num_processes)]
    assert [array.tolist() for array in arrays] == parts


def test_dictionaries_are_divided_value_by_value() -> None:
    inputs = {"ids": torch.arange(6).view(3, 2), "text": ("a", "b", "c"), "inner": {"x": [1, 2, 3]}, "note": "as is"}
    part = split(inputs, 1, 2)
    assert part["ids"].tolist() == [[4, 5]]
    assert (part["text"], part["inner"], part["note"]) == (("c",), {"x": [3]}, "as is")
    assert split(inputs, 1, 2, apply_padding=True)["ids"].tolist() == [[4, 5], [4, 5]]
    assert split({}, 1, 2) == {}


def test_values_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"differ in length \('a': 3, 'b': 2\)"):
        split({"a": [1, 2, 3], "b": (1, 2)}, 0, 2)
    with pytest.raises(ValueError, match=r"inputs\['in'\] differ in length"):
        split({"in": {"a": [1], "b": []}}, 0, 2)


@pytest.mark.parametrize("inputs", [None, 5, {1, 2}, torch.tensor(3), {"a": 5}, object()])
def test_what_has_no_parts_is_refused(inputs: Any) -> None:
    with pytest.raises(TypeError, match="cannot be split between processes: pass a list"):
        split(inputs, 0, 2)


def test_few_inputs_for_many_processes() -> None:
    assert [split([1], rank, 3) for rank in range(3)] == [[1], [], []]
    assert [split([1], rank, 3, apply_padding=True) for rank in range(3)] == [[1], [1], [1]]
    assert split([], 1, 3, apply_padding=True) == []
    assert split(torch.zeros(0, 2), 1, 3, apply_padding=True).shape == (0, 2)
    assert list(split(range(5), 1, 2)) == [3, 4]
    assert split(range(5), 1, 2, apply_padding=True) == [3, 4, 4]


def test_one_process_gets_exactly_what_it_gave_and_text_is_not_divided() -> None:
    assert split("abcd", 1, 2) == "abcd"
    inputs = {"a": [1], "b": [1, 2]}
    assert split(inputs, 0, 1) is inputs


def test_padded_tensors_go_to_the_device() -> None:
    part = split([1], 0, 2, apply_padding=True, device=torch.device("meta"))
    assert part == [1]
    assert split(torch.zeros(4), 0, 2, apply_padding=True, device=torch.device("meta")).is_meta
    assert not split(torch.zeros(4), 0, 2, device=torch.device("meta")).is_meta


def test_datasets_are_selected_from(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dataset:
        def __len__(self) -> int:
            return 3

        def select(self, positions: list[int]) -> list[int]:
            return positions

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=Dataset))  # type: ignore[arg-type]
    assert split(Dataset(), 0, 2) == [0, 1]
    assert split(Dataset(), 1, 2, apply_padding=True) == [2, 2]
    assert split({"rows": Dataset(), "names": ["a", "b", "c"]}, 1, 2) == {"rows": [2], "names": ["c"]}
