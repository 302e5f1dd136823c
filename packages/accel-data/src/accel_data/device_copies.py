"""Copies of batches to the device.

On an accelerator with streams they run on a stream of their own, while it computes: a loader starts to copy a batch as soon
as it has read it, and when the program asks for the batch, the stream that computes is made to wait for the copy, not the host.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from typing_extensions import override

from accel_ops.placement import send_to_device
from accel_state.devices import resolve_device
from accel_state.logging import get_logger

logger = get_logger(__name__)


class DeviceCopies(ABC):
    """The copies of a loader's batches to a device, one after the other."""

    are_started_early: bool
    """Whether `start` starts a copy, so that calling it early gains time."""

    @abstractmethod
    def start(self, batch: Any) -> Any:
        """Start to copy a batch; returns what `finish` needs."""

    @abstractmethod
    def finish(self, started: Any) -> Any:
        """The batch on the device, for what the program enqueues from now on."""

    def settle(self) -> None:
        """Wait until memory of the last batch may be written again, as a dataset does that reuses its buffers."""


@final
class DirectCopies(DeviceCopies):
    """Copies batches when they are asked for, in order with all that the program enqueues.

    Args:
        device (`torch.device`, *optional*): The device; None leaves batches where they are.
        non_blocking (`bool`): Whether the host goes on before the copy has ended.
    """

    are_started_early = False

    def __init__(self, device: torch.device | None, non_blocking: bool) -> None:
        self._device = device
        self._non_blocking = non_blocking

    @override
    def start(self, batch: Any) -> Any:
        """Nothing is started."""
        return batch

    @override
    def finish(self, started: Any) -> Any:
        """Copy the batch."""
        return started if self._device is None else send_to_device(started, self._device, self._non_blocking)


@final
class StreamCopies(DeviceCopies):
    """Copies batches on a stream of their own; the host does not wait for what is in pinned memory.

    Batches with leaves that are no plain tensors in CPU memory, such as objects with a `to` of their own, are copied in order
    with what the program enqueues: nobody could tell torch's allocator which stream uses the memory inside them.

    Args:
        device (`torch.device`): An accelerator with streams.
        non_blocking (`bool`): Whether the host goes on, too, where memory is not pinned.
    """

    are_started_early = True

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self._device = resolve_device(device)
        self._non_blocking = non_blocking
        self._module: Any = torch.get_device_module(device)
        self._stream = _copy_stream(self._device)
        self._ended: Any = None

    @override
    def start(self, batch: Any) -> tuple[Any, Any]:
        """Enqueue the copy, behind that of the batch before; returns the batch and the event at the end of its copy."""
        leaves = list(_leaves(batch))
        if not all(map(_may_change_stream, leaves)):
            return batch, None
        non_blocking = self._non_blocking or all(leaf.is_pinned() for leaf in leaves)
        if not non_blocking:
            _advise_pinning()
        # The device is set first: a thread that leaves a stream's context returns to GPU 0, and would take memory there.
        with self._module.device(self._device), self._module.stream(self._stream):
            copied = send_to_device(batch, self._device, non_blocking)
        self._ended = self._stream.record_event()
        return copied, self._ended

    @override
    def finish(self, started: tuple[Any, Any]) -> Any:
        """Make the current stream wait for the copy, and tell the allocator that it uses the batch's memory."""
        batch, ended = started
        if ended is None:
            return send_to_device(batch, self._device, self._non_blocking)
        computing = self._module.current_stream(self._device)
        computing.wait_event(ended)
        for leaf in _leaves(batch):
            leaf.record_stream(computing)
        return batch

    @override
    def settle(self) -> None:
        """Wait for the last copy; not for the device, which may be busy with what the program enqueued."""
        if self._ended is not None:
            self._ended.synchronize()


def make_copies(device: torch.device | str | None, non_blocking: bool) -> DeviceCopies:
    """The copies of one iteration of a loader.

    Args:
        device: The device of batches; None leaves them where they are.
        non_blocking: Whether the host goes on, too, where memory is not pinned.
    """
    target = None if device is None else torch.device(device)
    if target is not None and _has_streams(target):
        return StreamCopies(target, non_blocking)
    return DirectCopies(target, non_blocking)


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """The stream of all copies to a device: torch caches memory for each stream apart, so that one for each epoch would pile it up."""
    return torch.get_device_module(device).Stream(device=device)


def _has_streams(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta") and hasattr(getattr(torch, device.type, None), "Stream")


def _leaves(batch: Any) -> Iterator[Any]:
    """The leaves that `send_to_device` copies: tensors, and objects with a `to` of their own."""
    if isinstance(batch, (tuple, list)):
        items: Any = batch
    elif isinstance(batch, (dict, UserDict)) or (isinstance(batch, Mapping) and not hasattr(batch, "to")):
        items = batch.values()  # the second has a `to` in tokenizers' batches, which copies the same tensors
    else:
        if hasattr(batch, "to"):
            yield batch
        return
    for item in items:
        yield from _leaves(item)


def _may_change_stream(leaf: Any) -> bool:
    """Whether a leaf is a tensor in CPU memory, strided and without a dispatcher of its own."""
    is_plain = isinstance(leaf, torch.Tensor) and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_nested


@functools.cache
def _advise_pinning() -> None:
    """Say once how the host need not wait."""
    logger.info(
        "The host waits for the copy of each batch to the device, because batches are not in pinned memory. With "
        "DataLoader(pin_memory=True) copies overlap with compute and the host waits for none of them."
    )
