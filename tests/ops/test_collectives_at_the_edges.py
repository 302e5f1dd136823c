"""Collectives where they are most easily wrong: nothing brought, odd dtypes, views, every leaf of another length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_ops.collectives.payload import SLOT_BYTES
from accel_ops.collectives.tensors import broadcast, gather, pad_across_processes, reduce
from accel_state.errors import DistributedOperationException
from tests.support.ranks import ranks


@ranks(2)
@pytest.mark.parametrize("operation", [gather, pad_across_processes])
def test_nothing_against_something_raises_everywhere(rank: int, world: int, operation: Any) -> None:
    bring = [] if rank == 0 else [torch.ones(2)]
    with pytest.raises(DistributedOperationException, match=operation.__name__):
        operation(bring)
    assert operation([]) == []
    assert operation({"a": ()}) == {"a": ()}
    assert gather(torch.tensor(rank)).tolist() == [0, 1]  # the group still works


@ranks(2)
@pytest.mark.parametrize("num_rows", [2, SLOT_BYTES])
def test_views_arrive_as_their_values(rank: int, world: int, num_rows: int) -> None:
    def views_of(of: int) -> dict[str, torch.Tensor]:
        base = torch.arange(2.0 * num_rows).view(2, num_rows) + of
        number = torch.complex(base[0], base[1])
        return {
            "transposed": base.t(),
            "strided": base[0, ::2],
            "expanded": base[0, :1].expand(num_rows),
            "conjugate": number.conj(),
            "negative": number.conj().imag,
        }

    mine, everyones = views_of(rank), [views_of(of) for of in range(world)]
    together = gather(mine)
    for name, view in mine.items():
        expected = torch.cat([views[name] for views in everyones])
        assert torch.equal(together[name], expected), name
        assert torch.equal(gather(view), expected), name


@pytest.mark.sample(2)
@ranks(2, 4)
@pytest.mark.parametrize("scale", [1, 2000])
def test_every_leaf_may_have_lengths_of_its_own(rank: int, world: int, scale: int) -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.complex64]

    def leaf(index: int, of: int) -> torch.Tensor:
        return (torch.arange(scale * ((index + of) % 3) * 2).view(-1, 2) % 5 + of).to(dtypes[index % len(dtypes)])

    actual = gather([leaf(index, rank) for index in range(20)])
    for index, joined in enumerate(actual):
        assert torch.equal(joined, torch.cat([leaf(index, of) for of in range(world)])), index


@pytest.mark.sample(2)
@ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.complex64, torch.bool]
)
def test_reduce_keeps_the_dtype_of_sums(rank: int, world: int, dtype: torch.dtype) -> None:
    leaf = torch.tensor([rank, 1, 0]).to(dtype)
    expected = (torch.tensor([0, 1, 0]).to(dtype) + torch.tensor([1, 1, 0]).to(dtype)).tolist()
    alone = reduce(leaf, "sum")
    assert alone.dtype == dtype
    assert alone.tolist() == expected
    mixed = reduce([leaf, torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int8)], "sum")
    assert mixed[0].dtype == dtype
    assert mixed[0].tolist() == expected


@ranks(2)
@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
def test_gradients_of_what_is_reduced_flow_to_the_own_tensor(rank: int, world: int, reduction: Any) -> None:
    """As a loss that is averaged over processes before the backward pass needs it."""
    weight, plain = torch.full((3,), rank + 1.0, requires_grad=True), torch.ones(3)
    actual = reduce([weight * 2, plain, weight.bfloat16()], reduction)
    with torch.no_grad():
        assert not reduce(weight, reduction).requires_grad
    assert [leaf.requires_grad for leaf in actual] == [reduction != "max", False, reduction != "max"]
    if reduction != "max":
        actual[0] /= 4  # results are the caller's own
        (actual[0].sum() + actual[2].float().sum()).backward()
        own = 1.0 if reduction == "sum" else 1 / world
        assert weight.grad.tolist() == [own * 2 / 4 + own] * 3  # type: ignore[union-attr]
        assert actual[0].tolist() == [(1 + 2) * 2 * own / 4] * 3


@ranks(2)
def test_parameters_are_reduced_and_broadcast(rank: int, world: int) -> None:
    parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
    assert reduce(parameter, "sum").tolist() == [[1, 1]] * 2
    assert parameter.tolist() == [[rank, rank]] * 2
    assert broadcast(parameter, from_process=1) is parameter
    assert parameter.tolist() == [[1, 1]] * 2
    assert parameter.requires_grad
    transposed = torch.full((2, 3), float(rank)).t()
    assert broadcast(transposed, from_process=1).tolist() == [[1, 1]] * 3


@ranks(2)
@pytest.mark.parametrize("length", [3, 3000])
def test_an_expanded_tensor_is_broadcast(rank: int, world: int, length: int) -> None:
    plain = torch.full((2,), float(rank))
    for expand in ((0, 1), (0,), (1,)):  # on which ranks it is
        row = torch.arange(float(length)) + rank
        leaf = row.expand(2, length) if rank in expand else row.repeat(2, 1)
        actual = broadcast({"expanded": leaf, "plain": plain}, from_process=1)
        assert torch.equal(actual["expanded"], (torch.arange(float(length)) + 1).repeat(2, 1))
        assert actual["plain"] is plain


@ranks(2)
def test_a_default_device_of_the_program_is_not_that_of_messages(rank: int, world: int) -> None:
    mine, rows = torch.tensor([float(rank)]), torch.ones(rank + 1, 2)
    with torch.device("meta"):  # as torch.set_default_device does it
        gathered, summed, shared = gather({"a": mine, "b": [mine, mine]}), reduce(mine), broadcast(mine.clone())
        padded = pad_across_processes(rows)
        objects = gather_object([rank])
        given = broadcast_object_list(["first" if rank == 0 else None])
    assert gathered["a"].tolist() == gathered["b"][1].tolist() == [0, 1]
    assert (summed.item(), shared.item()) == (0.5, 0)
    assert padded.shape == (2, 2)
    assert not padded.is_meta
    assert objects == [0, 1]
    assert given == ["first"]


@ranks(2)
@pytest.mark.parametrize("strided_on", [0, 1])
def test_a_broadcast_does_not_ask_how_ranks_lay_out_their_tensors(rank: int, world: int, strided_on: int) -> None:
    shape = (3, 100_001)  # of bytes that are no multiple of any alignment
    tensor = torch.full(shape, rank + 1, dtype=torch.uint8)
    if rank == strided_on:
        tensor = tensor.t().contiguous().t()
    broadcast(tensor, from_process=1)
    assert tensor.eq(2).all()
    after = gather(torch.tensor([rank]))
    assert after.tolist() == [0, 1], "nothing is left on the wire"
