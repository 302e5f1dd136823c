"""How a batch travels from the process that reads to the others: each gets its share of the bytes, and no more.

In every round the reader sends each other process one message: a header, then that process's packed tensors. Both know
how long it is, because structure, dtypes and shapes are agreed on before; when they change, the reader sends the new
terms first.
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

from accel_ops.nested import flatten, rebuild
from accel_ops.packing import Signature, grouped_bytes, layout_of, signature_of, unpack
from accel_ops.transport import transport_of
from accel_state.processes import PartialState

HEADER_WORDS = 4
HEADER_BYTES = HEADER_WORDS * 8  # of int64: what it is, is it the last, samples of the round
DATA, TERMS, END, ERROR = range(4)
MAX_IN_FLIGHT = 2  # rounds that the reader may be ahead of a slow process


@dataclass(frozen=True, slots=True)
class ScatteredBatch:
    """What one process gets in a round."""

    batch: Any
    is_last: bool
    num_samples: int  # of the whole round


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """What receivers must know to unpack: structure around the tensors, and dtype and shape of each, per process."""

    skeleton: Any
    signatures: tuple[Signature, ...]


class BatchScatter:
    """Both ends of the line; every process makes one for each iteration.

    Args:
        state: The process; the first one reads.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._wire = transport_of(state).collective_device(state)
        self._terms = BatchSpec(None, ((),) * state.num_processes)
        self._agreed: Any = None  # what the reader compares a round with
        self._in_flight: deque[list[Any]] = deque()

    # ---- reading side -------------------------------------------------------------------------------------------

    def send(self, shares: Sequence[Any], is_last: bool, num_samples: int) -> ScatteredBatch:
        """Send every process its share; returns the reader's own.

        Args:
            shares: Nested tensors, one for each process.
            is_last: Whether the stream ends with this round.
            num_samples: Real samples of all shares together.

        Raises:
            TypeError: When a share holds something other than tensors.
        """
        with self.errors_for_all():
            flat = [flatten(share, "the dispatching data loader") for share in shares]
        agreed = [(structure, signature_of(leaves)) for leaves, structure in flat]
        if agreed != self._agreed:
            self._send_terms(shares, agreed)
        header = _header(DATA, int(is_last), num_samples)
        messages = {}
        for rank, (leaves, _), (_, signature) in zip(range(len(flat)), flat, agreed, strict=True):
            if rank != self._state.process_index:
                moved = [leaf.to(self._wire) for leaf in leaves]
                messages[rank] = torch.cat([header.to(self._wire), *grouped_bytes(moved, layout_of(signature))])
        self._start(messages)
        return ScatteredBatch(shares[self._state.process_index], is_last, num_samples)

    def _send_terms(self, shares: Sequence[Any], agreed: list[Any]) -> None:
        skeleton = rebuild(shares[0], iter(range(len(agreed[0][1]))))
        terms = BatchSpec(skeleton, tuple(signature for _, signature in agreed))
        self._announce(TERMS)
        dist.broadcast_object_list([terms], src=self._state.process_index, device=self._wire)
        self._terms = terms
        self._agreed = agreed

    def send_end(self) -> None:
        """Say that there is nothing (more) to read."""
        self._announce(END)

    @contextmanager
    def errors_for_all(self) -> Iterator[None]:
        """Let what is raised inside be raised by the other processes too: they are waiting for a round."""
        try:
            yield
        except Exception as error:
            self._announce(ERROR)
            sent = [_sendable(error)]
            dist.broadcast_object_list(sent, src=self._state.process_index, device=self._wire)
            raise

    def _announce(self, what: int) -> None:
        """Send messages without tensors, as long as those with them."""
        messages = {}
        for rank, signature in enumerate(self._terms.signatures):
            if rank != self._state.process_index:
                messages[rank] = torch.zeros(_length(signature), dtype=torch.uint8, device=self._wire)
                messages[rank][:HEADER_BYTES] = _header(what)
        self._start(messages)

    def _start(self, messages: dict[int, torch.Tensor]) -> None:
        """Begin to send; the reader goes on reading meanwhile."""
        self._in_flight.append([dist.isend(message, dst=rank) for rank, message in messages.items()])
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work in self._in_flight.popleft():
            work.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until everything that was sent has left, also when the loop over the batches was broken off."""
        with nullcontext() if kind is None else suppress(RuntimeError):  # the others may be gone by then
            while self._in_flight:
                self._wait_for_oldest()

    # ---- receiving side -----------------------------------------------------------------------------------------

    def receive(self, reader: int = 0) -> ScatteredBatch | None:
        """This process's share of the next round; None when there is none.

        Raises:
            Exception: What the reader raised while reading.
        """
        while True:
            signature = self._terms.signatures[self._state.process_index]
            message = torch.empty(_length(signature), dtype=torch.uint8, device=self._wire)
            dist.recv(message, src=reader)
            header = message[:HEADER_BYTES].view(torch.int64).tolist()
            if header[0] == DATA:
                leaves = unpack(message[HEADER_BYTES:], layout_of(signature))
                return ScatteredBatch(_fill(self._terms.skeleton, leaves), bool(header[1]), header[2])
            if header[0] == END:
                return None
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=reader, device=self._wire)
            if header[0] == ERROR:
                raise received[0]
            self._terms = received[0]


@lru_cache(maxsize=8)
def _header(*words: int) -> torch.Tensor:
    return torch.tensor([*words, *[0] * (HEADER_WORDS - len(words))], dtype=torch.int64).view(torch.uint8)


@lru_cache(maxsize=256)
def _length(signature: Signature) -> int:
    return HEADER_BYTES + sum(group.num_bytes for group in layout_of(signature).groups)


def _sendable(error: Exception) -> Exception:
    """The error, or its text where it cannot travel: classes with arguments of their own are written, but not read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _fill(skeleton: Any, leaves: list[torch.Tensor]) -> Any:
    """Put leaves where the skeleton has their numbers."""
    from accel_ops.nested import recursively_apply

    return recursively_apply(lambda number: leaves[number], skeleton, test_type=lambda item: isinstance(item, int))
