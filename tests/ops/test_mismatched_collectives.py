"""Ranks that call different collectives, or one with what does not fit together: an error on every rank, never a hang."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_ops.collectives.tensors import broadcast, gather, pad_across_processes, reduce
from accel_state.errors import DistributedOperationException
from tests.support.ranks import ranks

LARGE = 30_000  # more than what travels with an announcement
CALLS: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather(torch.ones(3)),
    "gather, large": lambda: gather(torch.ones(LARGE)),
    "gather, 2-dim": lambda: gather(torch.ones(3, 3)),
    "gather, many leaves": lambda: gather([torch.ones(1)] * 2000),
    "gather_object": lambda: gather_object([1]),
    "gather_object, large": lambda: gather_object(["x" * LARGE]),
    "reduce": lambda: reduce(torch.ones(3)),
    "reduce, sum": lambda: reduce(torch.ones(3), "sum"),
    "reduce, longer": lambda: reduce(torch.ones(4)),
    "reduce, other shape": lambda: reduce(torch.ones(1, 3)),
    "reduce, large": lambda: reduce(torch.ones(LARGE)),
    "reduce, larger": lambda: reduce(torch.ones(LARGE + 1)),
    "reduce, other dtype": lambda: reduce(torch.ones(3, dtype=torch.float64)),
    "reduce, nothing": lambda: reduce([]),
    "broadcast": lambda: broadcast(torch.ones(3)),
    "broadcast, longer": lambda: broadcast(torch.ones(4)),
    "broadcast, large": lambda: broadcast(torch.ones(LARGE)),
    "broadcast, from another": lambda: broadcast(torch.ones(3), from_process=1),
    "broadcast, nothing": lambda: broadcast({}),
    "broadcast_object_list": lambda: broadcast_object_list([1]),
    "broadcast_object_list, longer": lambda: broadcast_object_list([1, 2]),
    "broadcast_object_list, large": lambda: broadcast_object_list(["x" * LARGE] * 3),
    "pad_across_processes": lambda: pad_across_processes(torch.ones(3)),
    "pad_across_processes, two leaves": lambda: pad_across_processes([torch.ones(3)] * 2),
}
FITS = {("gather", "gather, large"), ("gather_object", "gather_object, large")}


@ranks(2)
def test_every_pair_of_different_calls_raises_on_both_ranks(rank: int, world: int) -> None:
    for pair in combinations(CALLS, 2):
        if pair in FITS:
            CALLS[pair[rank]]()
            continue
        with pytest.raises(DistributedOperationException) as caught:
            CALLS[pair[rank]]()
        text = str(caught.value)
        first, second = (call.partition(",")[0] for call in pair)
        assert f"rank 0: {first}(" in text, pair
        assert f"rank 1: {second}(" in text, pair
        assert ("different collectives" in text) == (first != second), pair
    assert gather(torch.tensor(rank)).tolist() == [0, 1]  # the group still works


@ranks(3)
def test_one_rank_of_three_is_enough(rank: int, world: int) -> None:
    with pytest.raises(DistributedOperationException, match=r"rank 2: reduce\(float32\[5\]\)"):
        reduce(torch.ones(5 if rank == 2 else 4))
    assert reduce(torch.tensor([float(rank)]), "sum").item() == 3


@pytest.mark.sample(4)
@ranks(2, 3)
@pytest.mark.parametrize("size", [0, 1, 5, LARGE])
@pytest.mark.parametrize("how", ["sum", "mean", "max", "min"])
def test_small_and_large_are_reduced_alike(rank: int, world: int, size: int, how: str) -> None:
    def brought(of: int) -> dict[str, torch.Tensor]:
        whole = torch.arange(size) % 7 + of
        return {"float": whole.float().view(-1, 1), "int": whole, "scalar": torch.tensor(of * 1.5)}

    everyones = [brought(of) for of in range(world)]
    mine = brought(rank)
    actual = reduce(mine, how)
    fold = {"sum": lambda x: x.sum(0), "mean": lambda x: x.sum(0) / world, "max": lambda x: x.amax(0)}
    fold["min"] = lambda x: x.amin(0)
    for name, leaf in mine.items():
        expected = fold[how](torch.stack([values[name] for values in everyones]))
        torch.testing.assert_close(actual[name], expected, rtol=1e-6, atol=0)
        assert torch.equal(leaf, everyones[rank][name])  # not changed


@ranks(2)
@pytest.mark.parametrize("size", [1, LARGE])
def test_objects_arrive_whatever_their_size(rank: int, world: int, size: int) -> None:
    mine = [{"rank": rank, "text": "é" * size * (rank + 1)}, torch.full((2,), rank)]
    actual = gather_object(mine)
    assert [item["text"] for item in actual[::2]] == ["é" * size, "é" * size * 2]
    assert torch.equal(torch.stack(actual[1::2]), torch.tensor([[0, 0], [1, 1]]))
    given = [rank, {"text": "x" * size * (rank + 1)}, None]
    kept = given
    assert broadcast_object_list(given, from_process=1) is kept
    assert kept == [1, {"text": "x" * size * 2}, None]
    with pytest.raises(ValueError, match="from 0 to 1"):
        broadcast_object_list([1], from_process=2)
