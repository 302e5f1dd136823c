"""What ranks tell each other, and where they are in a mesh: with values, in a rehearsal without.

The "fake" process group of torch copies this rank's input into every part of the output. So exchanges of Python objects, and the
announcements of our collectives, are right once they run with real tensors. A broadcast gives each rank what it has itself: what another
one would send nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from accel_ops.collectives.announcing import Operation
from accel_ops.collectives.objects import pickled
from accel_state.processes import PartialState

OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
RANDOM_STATES = ("get_rng_state", "set_rng_state")
MESHES = (
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.fsdp._fully_shard._fsdp_init",
)
OUR_MODULES = ("announcing", "gathering", "objects", "reducing", "tensors")
OUR_FUNCTIONS = ("announce", "payload_of", "_gather_payloads", "_broadcast_payload")


@contextmanager
def answered_by_this_rank() -> Iterator[None]:
    """A context in which exchanges run with real tensors."""
    with ExitStack() as stack:
        for owner, name in _exchanges():
            stack.enter_context(patch.object(owner, name, with_values(getattr(owner, name))))
        for module, name, own in BROADCASTS:
            owner = import_module(module)
            stack.enter_context(patch.object(owner, name, own(getattr(owner, name))))
        yield


def _own_objects(broadcast: Callable[..., None]) -> Callable[..., None]:
    """The broadcast of objects by torch, which leaves the list of a rank that is not the source as it is."""

    def call(
        objects: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: int | None = None
    ) -> None:
        if group_src == dist.get_rank(group) or (group_src is None and (src or 0) == dist.get_rank()):
            broadcast(objects, src, group, device, group_src)

    return call


def _own_payload(broadcast: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Our broadcast of objects: the operation has the list of this rank."""

    def call(payload: torch.Tensor, operation: Operation, source: int, state: PartialState) -> torch.Tensor:
        if source != state.process_index:
            return with_values(pickled)(list(operation.data))
        return broadcast(payload, operation, source, state)

    return call


def _own_leaves(broadcast: Callable[..., None]) -> Callable[..., None]:
    """Our broadcast of tensors, from this rank."""

    def call(*args: Any) -> None:
        *others, source, rank, world = args
        broadcast(*others, rank, rank, world)

    return call


BROADCASTS = (
    ("torch.distributed", "broadcast_object_list", _own_objects),
    ("torch.distributed.distributed_c10d", "broadcast_object_list", _own_objects),
    ("accel_ops.collectives.objects", "_broadcast_payload", _own_payload),
    ("accel_ops.collectives.tensors", "broadcast_leaves", _own_leaves),
)


def _exchanges() -> Iterator[tuple[Any, str]]:
    for owner in (dist, dist.distributed_c10d):
        yield from ((owner, name) for name in OBJECTS)
    for owner in (torch, torch.random):
        yield from ((owner, name) for name in RANDOM_STATES)
    for module in MESHES:
        theirs = import_module(module)
        yield from ((theirs, name) for name in ("init_device_mesh",) if hasattr(theirs, name))
    mesh: Any = dist.device_mesh.DeviceMesh
    yield from ((mesh, name) for name, method in vars(mesh).items() if isinstance(method, FunctionType))
    for module in OUR_MODULES:
        ours = import_module(f"accel_ops.collectives.{module}")
        yield from ((ours, name) for name in OUR_FUNCTIONS if hasattr(ours, name))


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function run with real tensors; fake ones among its arguments are zeros for it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            if any(
                isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))
            ):  # else lists stay the caller's
                args, kwargs = tree_map_only(FakeTensor, _zeros, (args, kwargs))
            return function(*args, **kwargs)

    return call


def _zeros(tensor: FakeTensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


__all__ = ["answered_by_this_rank", "with_values"]
