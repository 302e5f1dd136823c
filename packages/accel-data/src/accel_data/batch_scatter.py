"""Scattering batches from the main process: each rank receives its local batch only.

For every global batch the main process sends each rank one message: a header, then that rank's packed tensors. Both ends
know how long it is, because the spec (structure, dtypes and shapes) was broadcast before; when it changes, the new one is
broadcast first. Messages go between hosts, through CPU memory, where a loader's batches are.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
import torch.distributed as dist

from accel_ops.collectives.objects import pickled, unpickled
from accel_ops.collectives.packing import Signature, grouped_bytes, layout_of, signature_of, unpack
from accel_ops.collectives.transport import transport_of
from accel_ops.nested import flatten, rebuild, recursively_apply
from accel_state.processes import PartialState

HEADER_WORDS = 4
HEADER_BYTES = HEADER_WORDS * 8  # of int64: kind of message, whether it is the last, samples of the global batch
DATA, SPEC, END, ERROR = range(4)
PINNING_DEVICES = frozenset({"cuda", "xpu"})  # whose allocator of pinned memory waits for copies before it reuses any
MAX_IN_FLIGHT = 2  # global batches that the main process may be ahead of a slow rank


@dataclass(frozen=True, slots=True)
class ScatteredBatch:
    """The local batch of one rank, out of a global batch."""

    batch: Any
    is_last: bool
    num_samples: int  # of the global batch, without padding


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """What ranks need to unpack a batch: the structure around the tensors, and dtype and shape of each, per rank."""

    skeleton: Any
    signatures: tuple[Signature, ...]


class BatchScatter:
    """Sender and receiver of scattered batches; every process creates one for each iteration.

    Args:
        state: The process state; the main process reads.
        target: The device of received batches; that of this process when None.
    """

    def __init__(self, state: PartialState, target: torch.device | None = None) -> None:
        self._state = state
        self._target = state.device if target is None else target
        transport = transport_of(state).between_hosts(state)  # batches are read into CPU memory
        self._group = transport.group
        self._device = transport.collective_device(state)
        self._spec = BatchSpec(None, ((),) * state.num_processes)
        self._signatures: Any = None  # of the last global batch, on the main process
        self._in_flight: deque[list[Any]] = deque()

    # ---- sending side -------------------------------------------------------------------------------------------

    def send(self, local_batches: Sequence[Any], is_last: bool, num_samples: int) -> ScatteredBatch:
        """Send every rank its local batch; returns that of this rank.

        Args:
            local_batches: One for each rank: nested tensors, and other leaves that can be pickled.
            is_last: Whether this is the last global batch.
            num_samples: Samples of all local batches together, without padding.

        Raises:
            Exception: A leaf cannot be pickled.
        """
        local_batch = local_batches[self._state.process_index]
        with self.errors_for_all():
            try:
                flat = [flatten(batch, "the dispatching data loader") for batch in local_batches]
            except TypeError:  # not all leaves are tensors
                local_batches = [_with_pickled_rest(batch) for batch in local_batches]
                flat = [flatten(batch, "the dispatching data loader") for batch in local_batches]
        signatures = [(structure, signature_of(leaves)) for leaves, structure in flat]
        if signatures != self._signatures:
            self._broadcast_spec(local_batches, signatures)
        header = _header(DATA, int(is_last), num_samples)
        messages = {}
        for rank, (leaves, _), (_, signature) in zip(range(len(flat)), flat, signatures, strict=True):
            if rank != self._state.process_index:
                moved = [leaf.to(self._device) for leaf in leaves]
                messages[rank] = torch.cat([header.to(self._device), *grouped_bytes(moved, layout_of(signature))])
        self._start(messages)
        return ScatteredBatch(local_batch, is_last, num_samples)

    def _broadcast_spec(self, local_batches: Sequence[Any], signatures: list[Any]) -> None:
        skeleton = rebuild(local_batches[0], iter(range(len(signatures[0][1]))))
        spec = BatchSpec(skeleton, tuple(signature for _, signature in signatures))
        self._announce(SPEC)
        dist.broadcast_object_list([spec], src=self._state.process_index, group=self._group, device=self._device)
        self._spec = spec
        self._signatures = signatures

    def send_end(self) -> None:
        """Send the other ranks the message that there are no more batches."""
        self._announce(END)

    @contextmanager
    def errors_for_all(self) -> Iterator[None]:
        """A context whose exceptions are raised on the other ranks too, because they wait to receive."""
        try:
            yield
        except Exception as error:
            self._announce(ERROR)
            sent = [_sendable(error)]
            dist.broadcast_object_list(sent, src=self._state.process_index, group=self._group, device=self._device)
            raise

    def _announce(self, kind: int) -> None:
        """Send messages without tensors, as long as those with them."""
        messages = {}
        for rank, signature in enumerate(self._spec.signatures):
            if rank != self._state.process_index:
                messages[rank] = torch.zeros(_length(signature), dtype=torch.uint8, device=self._device)
                messages[rank][:HEADER_BYTES] = _header(kind)
        self._start(messages)

    def _start(self, messages: dict[int, torch.Tensor]) -> None:
        """Start sending asynchronously, so that reading overlaps with it."""
        self._in_flight.append(
            [dist.isend(message, dst=rank, group=self._group) for rank, message in messages.items()]
        )
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work in self._in_flight.popleft():
            work.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all sends, also after a `break` out of the loop over the batches."""
        with nullcontext() if kind is None else suppress(RuntimeError):  # the other ranks may have exited by then
            while self._in_flight:
                self._wait_for_oldest()

    # ---- receiving side -----------------------------------------------------------------------------------------

    def receive(self, reader: int = 0) -> ScatteredBatch | None:
        """Receive this rank's local batch of the next global batch; None at the end of the data.

        Args:
            reader: The rank that sends.

        Raises:
            Exception: The exception that the reader raised.
        """
        while True:
            signature = self._spec.signatures[self._state.process_index]
            message = self._new_message(_length(signature))
            dist.recv(message, src=reader, group=self._group)
            header = message[:HEADER_BYTES].view(torch.int64).tolist()
            if header[0] == DATA:
                data = message[HEADER_BYTES:].to(self._target, non_blocking=message.is_pinned())  # one copy for all
                leaves = unpack(data, layout_of(signature))
                batch = _fill(self._spec.skeleton, leaves)
                return ScatteredBatch(_without_pickled_rest(batch), bool(header[1]), header[2])
            if header[0] == END:
                return None
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=reader, group=self._group, device=self._device)
            if header[0] == ERROR:
                raise received[0]
            self._spec = received[0]

    def _new_message(self, num_bytes: int) -> torch.Tensor:
        """Memory for a message; pinned where the device copies from that without making the host wait."""
        pins = self._device.type == "cpu" and self._target.type in PINNING_DEVICES
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=pins)


class _PickledRest(list[torch.Tensor]):
    """The tensors of a batch that holds other leaves, too, and as bytes (uint8, one dimension) what is around them."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Stands for a tensor in what is pickled."""

    index: int


def _with_pickled_rest(batch: Any) -> _PickledRest:
    tensors = _PickledRest()

    def take(tensor: torch.Tensor) -> _Tensor:
        tensors.append(tensor)
        return _Tensor(len(tensors) - 1)

    rest = recursively_apply(take, batch)
    tensors.append(pickled(rest))
    return tensors


def _without_pickled_rest(batch: Any) -> Any:
    if not isinstance(batch, _PickledRest):
        return batch
    *tensors, rest = batch
    return recursively_apply(
        lambda stand_in: tensors[stand_in.index], unpickled(rest), test_type=lambda item: isinstance(item, _Tensor)
    )


@lru_cache(maxsize=8)
def _header(*words: int) -> torch.Tensor:
    return torch.tensor([*words, *[0] * (HEADER_WORDS - len(words))], dtype=torch.int64, device="cpu").view(
        torch.uint8
    )


@lru_cache(maxsize=256)
def _length(signature: Signature) -> int:
    return HEADER_BYTES + sum(group.num_bytes for group in layout_of(signature).groups)


def _sendable(error: Exception) -> Exception:
    """The exception, or a RuntimeError with its message if it cannot be pickled and unpickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _fill(skeleton: Any, leaves: list[torch.Tensor]) -> Any:
    """Replace the indices in the skeleton by the leaves."""
    return recursively_apply(lambda index: leaves[index], skeleton, test_type=lambda item: isinstance(item, int))
