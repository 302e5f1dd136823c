"""Where models are split into stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_integrations.parallel.pipeline.split import balance, split_model
from tests.support.tiny_transformer import make_model


class Branches(nn.Module):
    """Two chains beside a head that was registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.small = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.large = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)) for _ in range(2))
        self.stems = nn.ModuleList([nn.Linear(2, 2)])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(2, 2) for _ in range(3))


def test_a_transformer_is_split_between_blocks() -> None:
    split = split_model(make_model(layers=4), 2)
    assert split.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert (split.starts, split.split_points) == ((0, 2), ["blocks.2"])
    assert (split.before, split.after) == (("embedding", "positions"), ("norm", "head"))
    assert [split.last_block(stage) for stage in (0, 1)] == ["blocks.1", "blocks.3"]
    assert split.stages()["blocks.1"] == split.stages()["embedding"] == 0
    assert split.stages()["blocks.2"] == split.stages()["head"] == 1


def test_the_largest_chain_is_split_and_chains_inside_of_blocks_are_not() -> None:
    split = split_model(Branches(), 2)
    assert (split.blocks, split.before, split.after) == (("large.0", "large.1"), ("head", "small"), ("stems.0",))
    assert split_model(Branches(), 3).blocks == ("small.0", "small.1", "small.2")  # the only one that is long enough


def test_models_without_a_chain_are_split_between_their_children() -> None:
    assert split_model(Plain(), 3).split_points == ["two", "three"]
    assert split_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 2).blocks == ("0", "1", "2")


def test_given_split_points() -> None:
    model = make_model(layers=4)
    assert split_model(model, 3, ["blocks.1", "blocks.3"]).starts == (0, 1, 3)
    assert split_model(Branches(), 2, ["large.1.2"]).blocks == ("large.1.0", "large.1.1", "large.1.2")


@pytest.mark.parametrize(
    ("num_stages", "split_points", "message"),
    [
        (5, "auto", r"cannot be split into 5 stages: its longest chain .* has 4 .*'blocks.0'"),
        (2, ["block.2"], r"has no module 'block.2'. Did you mean 'blocks.2'"),
        (2, ["zzz"], r"has no module 'zzz'. Choose from model.named_modules"),
        (3, ["blocks.2"], r"make 2 stages, but 3 are needed. Name 2 modules"),
        (3, ["blocks.2", "blocks.1"], r"must be in order .* 'blocks.1', 'blocks.2', 'blocks.3'"),
        (2, ["blocks.0"], "leave at least one block for each stage"),
        (3, ["blocks.2", "norm"], "not modules of one chain"),
    ],
)
def test_splits_that_cannot_be(num_stages: int, split_points: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_model(make_model(layers=4), num_stages, split_points)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_the_largest_stage_is_as_small_as_possible(sizes: list[int], stages: int, before: int, after: int) -> None:
    stages = min(stages, len(sizes))

    def largest(starts: tuple[int, ...]) -> int:
        parts = [sum(sizes[a:b]) for a, b in zip(starts, (*starts[1:], len(sizes)), strict=True)]
        parts[0] += before
        parts[-1] += after
        return max(parts)

    actual = balance(sizes, stages, before, after)
    assert actual[0] == 0
    assert len(set(actual)) == stages
    assert largest(actual) == min(largest((0, *rest)) for rest in combinations(range(1, len(sizes)), stages - 1))
