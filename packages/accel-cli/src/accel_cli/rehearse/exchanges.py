"""What ranks tell each other, and where they are in a mesh: with values, in a rehearsal without.

The "fake" process group of torch copies this rank's input into every part of the output. So exchanges of Python objects, and the
announcements of our collectives, are right once they run with real tensors.
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

from accel_cli.rehearse.failures import NotRehearsedError

BROADCAST = "broadcast_object_list"
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
RANDOM_STATES = ("get_rng_state", "set_rng_state")
MESHES = (
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.fsdp._fully_shard._fsdp_init",
)
OUR_MODULES = ("announcing", "broadcasting", "gathering", "objects", "reducing", "tensors")
OUR_FUNCTIONS = ("announce", "payload_of", "_gather_payloads", "_broadcast_payload")


@contextmanager
def answered_by_rank_0() -> Iterator[None]:
    """A context in which exchanges run with real tensors."""
    with ExitStack() as stack:
        for owner, name in _exchanges():
            function = with_values(getattr(owner, name))
            stack.enter_context(patch.object(owner, name, _of_rank_0(function) if name == BROADCAST else function))
        yield


def _of_rank_0(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcast an object, if it is this rank's: what another one would say nobody knows."""

    def call(
        object_list: list[Any], src: int | None = None, *args: Any, group_src: int | None = None, **kwargs: Any
    ) -> Any:
        if src or group_src:
            raise NotRehearsedError(
                f"Rank 0 waits for an object that rank {src or group_src} would send, which a rehearsal of rank 0 cannot know. Pipeline "
                "parallelism is such a case; rehearse its other mesh dimensions."
            )
        return broadcast(object_list, src, *args, group_src=group_src, **kwargs)

    return call


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


__all__ = ["answered_by_rank_0", "with_values"]
