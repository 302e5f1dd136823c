"""The collectives of a rank, seen as operations of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_cli.estimate.live_memory import is_wrapper

NAMES = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_coalesced_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "all_reduce_coalesced_": "all-reduce",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
NAMESPACES = ("c10d", "_c10d_functional")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of this rank.

    Attributes:
        name: What it is, such as `"all-gather"`.
        group: The mesh dimension of its process group, or the number of its ranks.
        ranks: The global ranks of the group.
        num_bytes: The larger of its input and its output on this rank.
        in_background: Whether computing may go on meanwhile: those of data parallelism, whose results nothing waits for at once.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    num_bytes: int
    in_background: bool


class Traffic(TorchDispatchMode):
    """Records the collectives that run inside it.

    Args:
        on_collective: Called with each, and with the tensors of the operation.
    """

    def __init__(self, on_collective: Callable[[Collective, list[torch.Tensor]], None]) -> None:
        super().__init__()
        self._on_collective = on_collective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it is a collective."""
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES and (name := NAMES.get(func.overloadpacket.__name__)):
            arguments = [*args, *(kwargs or {}).values()]
            sides = [list(_tensors(side)) for side in (*arguments, result)]
            num_bytes = max(sum(t.numel() * t.element_size() for t in side) for side in sides)
            group = _group_of(arguments)
            ranks = tuple(dist.get_process_group_ranks(group))
            in_background = func.namespace == "c10d" and name not in ("send", "recv", "all-to-all")
            self._on_collective(
                Collective(name, _title(group, ranks), ranks, num_bytes, in_background),
                [tensor for side in sides for tensor in side],
            )
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _group_of(arguments: list[Any]) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: an object of C++, or a name."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
    names: list[Any] = [value for value in arguments if isinstance(value, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1])


def _title(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> str:
    """The mesh dimension of a group, as torch notes it in its description."""
    description = str(group.group_desc or "")
    return description.removeprefix("mesh_") if description.startswith("mesh_") else f"{len(ranks)} ranks"
