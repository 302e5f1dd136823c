"""Tensors without values, and replicas without other ranks, for programs that do not expect them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from accel_cli.rehearse.exchanges import with_values
from accel_state.warning import warn_user


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A context in which tensors have shapes, dtypes and lifetimes but no values, and models are moved and replicated all the same."""
    reducer: Any = dist.Reducer
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch.utils, "swap_tensors", _swap(torch.utils.swap_tensors)),
            (torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *args: True),
            (reducer, "_rebuild_buckets", with_values(reducer._rebuild_buckets)),  # it reads their order
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        if (
            find_spec("transformers") is not None
        ):  # it would take fake tensors for a graph that is being traced, and keep all masks
            tracing = import_module("transformers.utils.import_utils")
            stack.enter_context(patch.object(tracing, "is_fake_tensor", lambda tensor: False, create=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@contextmanager
def replicas() -> Iterator[None]:
    """A context in which `DistributedDataParallel` can use the "fake" process group, with values or without."""
    make = DistributedDataParallel.__init__
    with patch.object(DistributedDataParallel, "__init__", _replicate(make)):
        yield


def _swap(swap: Any) -> Any:
    """Swap the data of fake tensors alone: torch refuses to swap tensors that are referred to weakly, as fake ones are."""

    def swap_tensors(tensor: torch.Tensor, other: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            tensor.data = other.data
        else:
            swap(tensor, other)

    return swap_tensors


def _replicate(make: Any) -> Any:
    """Make replicas that all-reduce from Python, since the reducer would read a result that the "fake" process group lacks."""

    def replicate(replica: Any, *args: Any, **kwargs: Any) -> None:
        make(replica, *args, **kwargs)

        def all_reduce(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            dist.all_reduce(bucket.buffer(), group=replica.process_group)
            reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            reduced.set_result(bucket.buffer())
            return reduced

        all_reduce.__annotations__ = {}  # as strings torch takes them for wrong ones
        replica.register_comm_hook(None, all_reduce)
        replica.register_comm_hook = lambda state, hook: warn_user(
            "The communication hook is not rehearsed: gradients count as they are, uncompressed."
        )

    return replicate
