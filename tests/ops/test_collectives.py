"""Collectives over nested structures, on real gloo groups."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from accel_ops.collectives import tensors as collectives
from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_ops.collectives.payload import SLOT_BYTES
from accel_ops.collectives.tensors import (
    CannotPadNestedTensorWarning,
    broadcast,
    copy_tensor_to_devices,
    gather,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
)
from accel_ops.collectives.transport import ALL_GATHER
from accel_state.errors import DistributedOperationException
from accel_state.processes import PartialState
from tests.support.ranks import ranks

Point = namedtuple("Point", "x y")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


class CountCollectives:
    """Counts the messages of a `with` block."""

    NAMES = (
        ALL_GATHER,
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_object",
        "all_to_all_single",
    )

    def __enter__(self) -> CountCollectives:
        self.patches = [mock.patch.object(dist, name, wraps=getattr(dist, name)) for name in self.NAMES]
        self.mocks = [patch.__enter__() for patch in self.patches]
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in self.patches:
            patch.__exit__(None, None, None)
        self.count = sum(spy.call_count for spy in self.mocks)


def test_one_process_gets_its_own_objects_back() -> None:
    data = {"a": torch.ones(2)}
    assert gather(data) is data
    assert gather_object([1]) == [1]
    assert broadcast(data) is data
    assert pad_across_processes(data) is data
    total = reduce(data["a"], "mean")
    assert total is not data["a"]
    assert torch.equal(total, data["a"])
    assert copy_tensor_to_devices(data["a"]).tolist() == [1, 1]
    with pytest.raises(ValueError, match="None on the only process"):
        copy_tensor_to_devices()


@ranks(2, 4)
def test_gather_joins_by_rank_and_keeps_types(rank: int, world: int) -> None:
    data = OrderedDict(
        point=Point(torch.tensor(float(rank)), torch.full((2, 3), rank)),
        mixed=[torch.full((2, 2), rank % 2).to(dtype) for dtype in DTYPES],
        user=UserDict(deep=(torch.arange(3) + rank, torch.empty(0, 4))),
        strided=(torch.arange(6.0).view(2, 3) + rank).t(),
        grad=torch.full((1,), float(rank), requires_grad=True),
    )
    with CountCollectives() as counted:
        actual = gather(data)
    assert counted.count <= 2
    assert type(actual) is OrderedDict
    assert type(actual["point"]) is Point
    assert type(actual["user"]) is UserDict
    assert actual["point"].x.tolist() == list(range(world))
    assert actual["point"].y.shape == (2 * world, 3)
    for dtype, leaf in zip(DTYPES, actual["mixed"], strict=True):
        assert leaf.dtype == dtype
        assert leaf[:, 0].tolist() == [r % 2 for r in range(world) for _ in range(2)]
    assert actual["user"]["deep"][0].tolist() == [value + r for r in range(world) for value in range(3)]
    assert actual["user"]["deep"][1].shape == (0, 4)
    assert torch.equal(actual["strided"], torch.cat([(torch.arange(6.0).view(2, 3) + r).t() for r in range(world)]))
    assert not actual["grad"].requires_grad


@pytest.mark.sample(4)
@ranks(2)
@pytest.mark.parametrize("num_leaves", [1, 64, 3000])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("width", [1, 3000])
def test_any_number_of_leaves_takes_few_collectives(
    rank: int, world: int, num_leaves: int, ragged: bool, width: int
) -> None:
    num_leaves = min(num_leaves, 64) if width > 1 else num_leaves
    rows = [1 + (r + 1) * ragged for r in range(world)]
    leaves = [torch.full((rows[rank], width), float(rank * 10000 + index)) for index in range(num_leaves)]
    with CountCollectives() as counted:
        actual = gather(leaves)
    small = width * sum(rows) * num_leaves * 4 < SLOT_BYTES // 4
    assert counted.count == (
        3 if num_leaves == 3000 else 1 if small else 2
    )  # 3000 sizes need a collective of their own
    for index, leaf in enumerate(actual):
        expected = [float(r * 10000 + index) for r in range(world) for _ in range(rows[r])]
        assert leaf[:, 0].tolist() == leaf[:, -1].tolist() == expected


@ranks(2)
def test_a_rank_may_bring_nothing(rank: int, world: int) -> None:
    actual = gather({"a": torch.ones(3 * rank, 2), "b": torch.zeros(rank * 5000)})
    assert actual["a"].shape == (3, 2)
    assert actual["b"].shape == (5000,)


@ranks(2)
@pytest.mark.parametrize(
    "kind",
    ["width", "dtype", "number", "keys", "ndim"],
)
def test_what_does_not_fit_together_raises_everywhere(rank: int, world: int, kind: str) -> None:
    bring = {
        "width": torch.ones(2, 3 + rank),
        "dtype": torch.ones(2, dtype=[torch.float32, torch.float64][rank]),
        "number": [torch.ones(1)] * (1 + rank),
        "keys": {"ab"[rank]: torch.ones(1)},
        "ndim": torch.ones((2,) * (1 + rank)),
    }[kind]
    with pytest.raises(DistributedOperationException, match=r"(?s)gather.*rank 0: .*rank 1: "):
        gather(bring)
    assert gather(torch.tensor(rank)).tolist() == [0, 1]  # the group still works


@ranks(2)
def test_only_tensors_travel(rank: int, world: int) -> None:
    for operation in (gather, reduce, broadcast, pad_across_processes):
        with pytest.raises(TypeError, match=f"{operation.__name__} got 'text' of type str"):
            operation({"a": torch.ones(1), "b": "text"})


@ranks(2, 4)
def test_reduce(rank: int, world: int) -> None:
    total = world * (world + 1) // 2
    data = {"a": torch.full((3,), rank + 1.0), "b": [torch.tensor(rank + 1), torch.full((2,), rank + 1.0).bfloat16()]}
    original = data["a"].clone()
    for reduction, expected in (("sum", total), ("mean", total / world), ("max", world), ("min", 1)):
        actual = reduce(data, reduction)
        assert actual["a"].tolist() == [expected] * 3
        assert actual["b"][0].item() == expected
        assert actual["b"][1].dtype == torch.bfloat16
    assert torch.equal(data["a"], original)
    with CountCollectives() as counted:
        assert reduce(data, "none") is data
    assert counted.count == 0
    with CountCollectives() as counted:
        reduce([torch.ones(3) for _ in range(64)], "sum")
    assert counted.count == 1
    with CountCollectives() as counted:
        reduce(data, "sum")
    assert counted.count == 1
    with pytest.raises(ValueError, match="reduction='median'"):
        reduce(data, "median")  # type: ignore[arg-type]


@ranks(2, 4)
def test_broadcast(rank: int, world: int) -> None:
    leaf = torch.full((2,), float(rank))
    data = {"a": leaf, "b": (torch.tensor([rank]), torch.empty(0))}
    with CountCollectives() as counted:
        actual = broadcast(data, from_process=1)
    assert counted.count == 1
    assert actual["a"] is leaf
    assert leaf.tolist() == [1, 1]
    assert actual["b"][0].item() == 1
    with pytest.raises(ValueError, match=f"from_process={world}"):
        broadcast(data, from_process=world)


@ranks(2)
def test_objects(rank: int, world: int) -> None:
    assert gather_object([rank, "x"]) == [0, "x", 1, "x"]
    assert gather_object({"k": rank}) == ["k", "k"]
    assert broadcast_object_list([rank, {"a": rank}], from_process=1) == [1, {"a": 1}]
    with pytest.raises(TypeError, match="pass \\[3\\]"):
        gather_object(3)


@ranks(2)
def test_a_tensor_that_one_process_has(rank: int, world: int) -> None:
    held = torch.arange(6.0).view(2, 3) if rank == 1 else None
    shape, dtype = gather_tensor_shape(held)
    assert (shape, dtype) == (torch.Size([2, 3]), 1)
    assert copy_tensor_to_devices(held).tolist() == [[0, 1, 2], [3, 4, 5]]
    for wrong in (None, torch.ones(1)):
        with pytest.raises(ValueError, match="One rank must pass the tensor"):
            copy_tensor_to_devices(wrong)


@ranks(2)
def test_padding(rank: int, world: int) -> None:
    data = {"a": torch.ones(rank + 1, 2), "b": [torch.tensor(3), torch.ones(4, rank + 1)]}
    with CountCollectives() as counted:
        actual = pad_across_processes(data, pad_index=7, pad_first=True)
    assert counted.count == 1
    assert actual["a"].tolist() == ([[7, 7], [1, 1]] if rank == 0 else [[1, 1], [1, 1]])
    assert actual["b"][0] is data["b"][0]
    assert pad_across_processes(data["b"][1], dim=-1).shape == (4, 2)
    mask, ids = torch.ones(rank + 1, dtype=torch.bool), torch.ones(rank + 1, dtype=torch.int8)
    assert pad_across_processes(mask).tolist() == [True, rank == 1], "a mask stays one"
    labels, halves, same = (pad_across_processes([mask, ids, mask[:1]], pad_index=index) for index in (-100, 0.5, 0))
    assert labels[0].tolist() == [1, -100 if rank == 0 else 1], "which is not True"
    assert [leaf.dtype for leaf in labels] == [torch.int64, torch.int8, torch.bool], "the same on every process"
    assert [leaf.dtype for leaf in halves] == [torch.float32, torch.float32, torch.bool]
    assert [leaf.dtype for leaf in same] == [torch.bool, torch.int8, torch.bool]
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.warns(CannotPadNestedTensorWarning):
        assert pad_across_processes(nested) is nested
    with pytest.raises(DistributedOperationException, match="pad_across_processes"):
        pad_across_processes([torch.ones(1)] * (rank + 1))
    with pytest.raises(DistributedOperationException, match="the same number of dimensions"):
        pad_across_processes(torch.ones([2] * (rank + 1)))


@ranks(2)
def test_debug_mode_names_the_operation_and_all_shapes(rank: int, world: int) -> None:
    PartialState().debug = True
    try:
        for operation in (reduce, broadcast):
            with pytest.raises(
                DistributedOperationException, match=r"(?s)collectives\.\w+.*Process 0: .*1\].*Process 1: .*2\]"
            ):
                operation(torch.ones(rank + 1))
        assert reduce(torch.ones(1), "sum").item() == 2
    finally:
        PartialState().debug = False


def test_dtype_numbers_go_both_ways() -> None:
    for number, dtype in collectives.TENSOR_INT_TO_DTYPE.items():
        assert collectives.TENSOR_TYPE_TO_INT[dtype] == number


@ranks(2)
def test_results_can_be_written_to_with_gradients(rank: int, world: int) -> None:
    """A contrastive loss puts a process's own part, with its gradient, back into what was gathered."""
    large = torch.ones(2 * SLOT_BYTES)
    for results in (
        lambda: gather([torch.ones(4, 2), torch.ones(4)]),
        lambda: gather([torch.ones(4 + rank), torch.ones(4 + rank, 3)]),
        lambda: gather([large]),
        lambda: gather([large, large]),
        lambda: gather([large, large[rank:]]),
        lambda: reduce([torch.ones(4, 2), torch.ones(4)]),
        lambda: reduce([large, large]),
        lambda: [pad_across_processes(torch.ones(4 + rank))],
    ):
        with torch.no_grad():
            actual = results()
        for leaf in actual:
            own = torch.full_like(leaf[:4], 3.0, requires_grad=True)
            others = [other.clone() for other in actual if other is not leaf]
            leaf[:4] = own
            leaf.sum().backward()
            assert own.grad is not None
            assert own.grad.unique().item() == 1
            assert all(map(torch.equal, others, [other for other in actual if other is not leaf]))


@ranks(2)
def test_a_small_result_does_not_keep_the_memory_of_a_large_one(rank: int, world: int) -> None:
    small, _ = reduce([torch.ones(1), torch.ones(1 << 20)])
    assert small.untyped_storage().nbytes() < 1 << 10
    small, _ = gather([torch.ones(1), torch.ones(1 << 20)])
    assert small.untyped_storage().nbytes() < 1 << 10
