"""NCCL and gloo groups of any number of ranks in one process: every other rank holds what this one does.

They are torch's "fake" groups under the names of the real backends, so `torch.distributed` itself says which device has no
backend. What they leave unwritten is filled in here: a gather brings this rank's data once for each rank, a scatter this
rank's share of its own data, a receive zeros; a sum is that of this rank alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import FakeProcessGroup, _create_work_from_future
from torch.distributed.checkpoint import default_planner
from torch.utils._pytree import tree_leaves

from accel_ops.collectives.participants import Participants
from tests.cuda_shapes.memory import memory_of


class _IsPretended(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance) is FakeProcessGroup


def _pretended(real: Any) -> Any:
    class Pretended(metaclass=_IsPretended):
        Options = real.Options

        def __new__(cls, store: Any, rank: int, size: int, *options: Any, **more: Any) -> Any:
            return FakeProcessGroup._create_internal(rank, size)

    return Pretended


def pretend_groups() -> None:
    """Replace both backends in this process, and the store by which ranks find one another.

    Other ranks also count as present in saves, to which they bring no shards: torch's check of that is left out.
    """
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupGloo"):  # the second is torch 2.15's
        if hasattr(c10d, name):
            setattr(c10d, name, _pretended(getattr(c10d, name)))
    FakeProcessGroup._set_sequence_number_for_group = lambda group: None  # type: ignore[method-assign]
    real = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        real(*args, store=dist.HashStore(), **kwargs)

    dist.init_process_group = init_process_group
    older = default_planner._validate_global_plan.__annotations__["return"] in (bool, "bool")  # torch 2.11 and before
    default_planner._validate_global_plan = lambda *arguments: True if older else []  # type: ignore[assignment]
    Participants._await_others = lambda *arguments: True  # type: ignore[method-assign]


def launch(world: int, local_rank: int) -> None:
    """Be rank 0 of a launch, on a GPU that is not the first one: who asks for GPU 0 by mistake is seen."""
    os.environ.update(
        RANK="0", WORLD_SIZE=str(world), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(min(world, 8)),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip


# ---- what the collectives of equal ranks bring ----------------------------------------------------------------------


def _rank_and_size(group: Any) -> tuple[int, int]:
    opened = dist.ProcessGroup.unbox(group)
    return opened.rank(), opened.size()


def _scattered(target: torch.Tensor, source: torch.Tensor, rank: int, size: int) -> None:
    memory_of(target).view(-1).copy_(memory_of(source).reshape(size, -1)[rank])


def _exchanged(target: torch.Tensor, source: torch.Tensor, rank: int, size: int) -> None:
    if target.numel() == source.numel() and source.numel() % size == 0:
        memory_of(target).view(size, -1).copy_(memory_of(source).reshape(size, -1)[rank].expand(size, -1))
    else:
        memory_of(target).zero_()


def _gather_base(args: Any) -> None:
    size = _rank_and_size(args[2])[1]
    memory_of(args[0]).view(size, -1).copy_(memory_of(args[1]).reshape(1, -1).expand(size, -1))


def _gather_lists(args: Any) -> None:
    for targets, source in zip(args[0], args[1], strict=False):
        for target in targets:
            memory_of(target).copy_(memory_of(source).view_as(target))


def _gather_coalesced(args: Any) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        _gather_base((target, source, args[2]))


def _reduce_scatter_base(args: Any) -> None:
    _scattered(args[0], args[1], *_rank_and_size(args[2]))


def _reduce_scatter_coalesced(args: Any) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        _scattered(target, source, *_rank_and_size(args[2]))


def _scatter_lists(args: Any) -> None:
    rank = _rank_and_size(args[2])[0]
    for target, sources in zip(args[0], args[1], strict=False):
        memory_of(target).copy_(memory_of(sources[rank]).view_as(target))


def _exchange_base(args: Any) -> None:
    _exchanged(args[0], args[1], *_rank_and_size(args[2]))


def _exchange_lists(args: Any) -> None:
    rank = _rank_and_size(args[2])[0]
    for target in args[0]:
        same = args[1][rank].numel() == target.numel()
        memory_of(target).copy_(memory_of(args[1][rank]).view_as(target) if same else torch.zeros(()))


def _receive(args: Any) -> None:
    for target in args[0]:
        memory_of(target).zero_()


FILL: dict[str, Callable[[Any], None]] = {
    "_allgather_base_": _gather_base,
    "allgather_": _gather_lists,
    "gather_": _gather_lists,
    "allgather_into_tensor_coalesced_": _gather_coalesced,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "reduce_scatter_": _scatter_lists,
    "scatter_": _scatter_lists,
    "alltoall_base_": _exchange_base,
    "alltoall_": _exchange_lists,
    "recv_": _receive,
    "recv_any_source_": _receive,
}


ASYNC = 4  # the place of `async_op` among the arguments of `allreduce_`, where it is True by default
SHELF: list[Any] = []
"""The tensors of the last collective that ran in the background: NCCL keeps those of works on which nobody waits, such as
DDP's, until the next collective of the group."""


def complete(name: str, args: Any, result: Any) -> Any:
    """Fill the outputs of one of torch's c10d operations, and return its result with a work whose future has them."""
    SHELF.clear()
    if name == "allreduce_" and (len(args) <= ASYNC or args[ASYNC]):
        SHELF.append(args[0])
    if name in FILL:
        FILL[name](args)
    outputs = [one for one in tree_leaves(args[0]) if isinstance(one, torch.Tensor)]
    devices = sorted({one.device for one in outputs if one.is_cuda}, key=str)
    future: Any = torch.futures.Future(devices=devices)  # type: ignore[no-untyped-call]
    future.set_result(outputs)
    work = _create_work_from_future(future).boxed()
    return (*result[:-1], work) if isinstance(result, tuple) else work


def complete_functional(name: str, args: Any, result: torch.Tensor) -> torch.Tensor:
    """The same for functional collectives."""
    if name == "reduce_scatter_tensor":
        group = c10d._resolve_process_group(args[3])
        _scattered(result, args[0], group.rank(), group.size())
    elif name == "all_to_all_single":
        group = c10d._resolve_process_group(args[3])
        _exchanged(result, args[0], group.rank(), group.size())
    return result
