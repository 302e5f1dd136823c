"""Tensors of a model become a parameter of megatron-core and its shards, and come back as they were."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from accel_integrations.megatron.weights.layouts import GateAndUp, Layout, Plain, QueryKeyValue, Vocabulary


@dataclass(frozen=True)
class Case:
    """A layout with the shapes of its tensors.

    Args:
        layout: The layout.
        shapes: Of the tensors of the model.
        ranks: Over how many it is sharded.
    """

    layout: Layout
    shapes: tuple[tuple[int, ...], ...]
    ranks: int

    def tensors(self) -> list[Tensor]:
        """Tensors whose elements all differ."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        numbers = torch.arange(float(sum(sizes))).split(sizes)
        return [part.reshape(shape) for part, shape in zip(numbers, self.shapes, strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layout, of weights (two dimensions) or biases (one)."""
    small = st.integers(1, 4)
    ranks, columns = draw(small), draw(small)
    rest = draw(st.sampled_from([(), (columns,)]))
    kind = draw(st.sampled_from(["plain", "transposed", "vocabulary", "qkv", "kv", "fused", "gate"]))
    rows = ranks * draw(small)
    if kind == "plain":
        return Case(Plain(draw(st.sampled_from([None, 0]))), ((rows, *rest),), ranks)
    if kind == "transposed":
        return Case(Plain(draw(st.sampled_from([0, 1])), transposed=True), ((rows, ranks * columns),), ranks)
    if kind == "vocabulary":
        return Case(Vocabulary(rows - draw(st.integers(0, rows - 1)), rows), ((rows, *rest),), ranks)
    if kind == "gate":
        return Case(GateAndUp(), ((rows, *rest), (rows, *rest)), ranks)
    size, per_group = draw(small), 0 if kind == "kv" else draw(small)
    heads, of_keys = rows * per_group, rows * size
    of_queries = heads * size
    if kind == "fused":
        transposed = bool(rest) and draw(st.booleans())
        shape = (of_queries + 2 * of_keys, *rest)
        return Case(
            QueryKeyValue(heads, rows, size, fused=True, transposed=transposed),
            (shape[::-1] if transposed else shape,),
            ranks,
        )
    shapes = ((of_keys, *rest), (of_keys, *rest))
    return Case(QueryKeyValue(heads, rows, size), shapes if kind == "kv" else ((of_queries, *rest), *shapes), ranks)


@given(cases())
def test_what_is_joined_and_sharded_comes_back(case: Case) -> None:
    layout, tensors = case.layout, case.tensors()
    if isinstance(layout, Vocabulary):
        tensors = [tensors[0][: layout.num_tokens]]
    full = layout.join(tensors)
    shards = [layout.shard(full, rank, case.ranks) for rank in range(case.ranks)]
    assert len({shard.shape for shard in shards}) == 1, "ranks hold equal parts"
    if layout.dim is not None:
        assert sum(shard.numel() for shard in shards) == full.numel(), "and none holds more than its part"
    assert torch.equal(layout.unshard(shards), full)
    for actual, expected in zip(layout.split(full), tensors, strict=True):
        assert torch.equal(actual, expected)


@given(cases())
def test_heads_are_never_cut(case: Case) -> None:
    """Each shard of queries, keys and values is the layout of fewer heads."""
    layout = case.layout
    if not isinstance(layout, QueryKeyValue) or layout.fused:
        return
    tensors = case.tensors()
    less = QueryKeyValue(layout.heads // case.ranks, layout.groups // case.ranks, layout.head_size)
    for rank in range(case.ranks):
        own = layout.shard(layout.join(tensors), rank, case.ranks)
        for actual, of_all in zip(less.split(own), tensors, strict=True):
            assert torch.equal(actual, of_all.chunk(case.ranks)[rank])
