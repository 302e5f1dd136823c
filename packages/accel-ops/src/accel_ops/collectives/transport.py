"""All-gather, all-reduce and broadcast of flat buffers, with one implementation per kind of process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Protocol, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from accel_ops.collectives.store_exchange import group_timeout
from accel_state.enums import DistributedType
from accel_state.environment import patch_environment
from accel_state.interfaces import INTERFACE_VARIABLE, interface_to
from accel_state.processes import PartialState
from accel_state.supervision import report_progress
from accel_state.warning import warn_user

_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def host_group(group: Any = None) -> Any:
    """The process group for tensors in CPU memory of the ranks of another one.

    The first call for a group is a collective of all its ranks, unless it takes CPU tensors itself.

    Args:
        group: The process group; the default one when None.

    Returns:
        The group itself if it takes CPU tensors, a gloo group of the same ranks if not; None where gloo cannot be had.
    """
    group = dist.group.WORLD if group is None else group
    if group not in _groups:
        takes_cpu = torch.device("cpu") in group._device_types
        _groups[group] = group if takes_cpu else new_host_group(group)
    return _groups[group]


def new_host_group(group: Any) -> Any:
    """A further gloo group of the ranks of a process group, for collectives that must not get between others.

    A collective of all its ranks. None, after a warning, where gloo cannot be had.
    """
    if not dist.is_gloo_available():
        return None
    is_world = group == dist.group.WORLD
    try:
        with _interface_to_rank_0():
            return dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=max(timedelta(seconds=group_timeout(group)), dist.default_pg_timeout),
                backend="gloo",
                use_local_synchronization=not is_world,
                group_desc="host",
            )
    except RuntimeError as error:
        warn_user(
            f"The hosts cannot talk to each other through gloo ({error}), so every gather waits for the device. Set "
            f"{INTERFACE_VARIABLE} to the network interface that connects the machines."
        )
        return None


@contextmanager
def _interface_to_rank_0() -> Iterator[None]:
    """Have gloo use the network interface through which rank 0 is reached.

    Of its own it uses the address of the host's name, which on many machines is that of the loopback interface.
    """
    interface = None if INTERFACE_VARIABLE in os.environ else interface_to(os.environ.get("MASTER_ADDR"))
    with patch_environment(**({INTERFACE_VARIABLE: interface} if interface else {})):
        yield


ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # its old name

CPU = torch.device("cpu")
CPU_BACKENDS = frozenset({"gloo", "mpi", "ccl"})
"""Backends whose collectives take tensors in CPU memory."""

Reduction = Literal["sum", "max", "min"]


class Transport(Protocol):
    """Runs collectives on flat buffers."""

    group: Any
    """The process group of `torch.distributed`; None for the default one."""
    sends_objects: bool
    """Whether sizes may differ from call to call, as those of pickled objects do."""
    scales: bool
    """Whether `reduce(scale=...)` applies, which accelerate has for XLA alone."""

    def collective_device(self, state: PartialState) -> torch.device:
        """The device on which buffers must be."""
        ...

    def between_hosts(self, state: PartialState) -> Transport:
        """The transport for tensors in CPU memory; this one itself where there is no other."""
        ...

    def all_gather(self, buffer: torch.Tensor, world: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """All-gather a buffer of shape (n,), the same on all ranks, to shape (world, n).

        Args:
            buffer: The data of this rank.
            world: The number of ranks.
            out: The output buffer, of shape (world * n,); allocated when None.
        """
        ...

    def all_reduce(self, buffer: torch.Tensor, how: Reduction = "sum") -> torch.Tensor:
        """All-reduce a buffer by sum, maximum or minimum; may change `buffer`."""
        ...

    def broadcast(self, buffer: torch.Tensor, source: int, rank: int) -> torch.Tensor:
        """Broadcast the buffer of rank `source`; may change `buffer`."""
        ...


@final
class TorchTransport:
    """`torch.distributed` with whatever backend its group has.

    Args:
        group: The process group; the default one when None.
        takes_cpu: Whether buffers are in CPU memory, whatever the backend of the run.
    """

    sends_objects, scales = True, False

    def __init__(self, group: Any = None, takes_cpu: bool = False) -> None:
        self.group = group
        self._takes_cpu = takes_cpu

    def collective_device(self, state: PartialState) -> torch.device:
        """The CPU if the backend takes CPU tensors, as gloo and MPI do; the process's device otherwise."""
        return CPU if self._takes_cpu or str(state.backend or "") in CPU_BACKENDS else state.device

    def between_hosts(self, state: PartialState) -> Transport:
        """The transport of the host group; this one itself if it takes CPU tensors, or there is no such group."""
        if self.collective_device(state).type == "cpu":
            return self
        group = host_group(self.group)
        return self if group is None else TorchTransport(group, takes_cpu=True)

    def all_gather(self, buffer: torch.Tensor, world: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """All-gather a buffer of shape (n,) to shape (world, n)."""
        report_progress()
        gathered = buffer.new_empty(world * buffer.numel()) if out is None else out
        getattr(dist, ALL_GATHER)(gathered, buffer, group=self.group)
        return gathered.view(world, buffer.numel())

    def all_reduce(self, buffer: torch.Tensor, how: Reduction = "sum") -> torch.Tensor:
        """All-reduce a buffer in place."""
        report_progress()
        dist.all_reduce(buffer, getattr(dist.ReduceOp, how.upper()), group=self.group)
        return buffer

    def broadcast(self, buffer: torch.Tensor, source: int, rank: int) -> torch.Tensor:
        """Broadcast the buffer of rank `source`, in place."""
        report_progress()
        dist.broadcast(buffer, group=self.group, group_src=source)
        return buffer


@final
class XlaTransport:
    """torch_xla: collectives become part of the compiled program."""

    group: Any = None
    sends_objects, scales = False, True

    def collective_device(self, state: PartialState) -> torch.device:
        """The XLA device."""
        return state.device

    def between_hosts(self, state: PartialState) -> Transport:
        """This one: XLA has no group of hosts."""
        return self

    def all_gather(self, buffer: torch.Tensor, world: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """All-gather a buffer of shape (n,) to shape (world, n)."""
        gathered = _xla().all_gather(buffer)
        return (gathered if out is None else out.copy_(gathered)).view(world, buffer.numel())

    def all_reduce(self, buffer: torch.Tensor, how: Reduction = "sum") -> torch.Tensor:
        """All-reduce a buffer."""
        return _xla().all_reduce(how, buffer)

    def broadcast(self, buffer: torch.Tensor, source: int, rank: int) -> torch.Tensor:
        """Broadcast the buffer of rank `source`, as an all-reduce of it and zeros."""
        wide = buffer.to(torch.int32) if buffer.dtype == torch.uint8 else buffer
        return _xla().all_reduce("sum", wide if rank == source else torch.zeros_like(wide)).to(buffer.dtype)


def _xla() -> Any:
    import torch_xla.core.xla_model as xm

    return xm


TORCH, XLA = TorchTransport(), XlaTransport()
TRANSPORTS: dict[DistributedType, Transport] = {DistributedType.XLA: XLA}  # all others go through torch.distributed


def transport_of(state: PartialState) -> Transport:
    """The transport for the distributed type of the run."""
    return TRANSPORTS.get(state.distributed_type, TORCH)


def collective_device(group: Any) -> torch.device:
    """The device of tensors for collectives of one process group of `torch.distributed`: as `TorchTransport` says."""
    return CPU if dist.get_backend(group) in CPU_BACKENDS else PartialState().device
