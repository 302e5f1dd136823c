"""How a batch travels from the process that reads to the others: each gets its share of the bytes, and no more.

In every round the reader scatters one buffer to each process: a header, then that process's packed tensors. All buffers
have the capacity agreed on last; when a share does not fit, or its tensors have another structure, the reader sends the
new terms first, and scatters then.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_ops.nested import flatten, rebuild
from accel_ops.packing import layout_of, pack, signature_of, unpack
from accel_ops.transport import transport_of
from accel_state.processes import PartialState

WORD_BYTES = 8
HEADER_WORDS = 8
HEADER_BYTES = HEADER_WORDS * WORD_BYTES  # of int64: what it is, is it the last, samples of the round
DATA, TERMS, END, ERROR = range(4)
FIRST_CAPACITY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Share:
    """What one process gets in a round."""

    batch: Any
    is_last: bool
    num_samples: int  # of the whole round


@dataclass(frozen=True, slots=True)
class Terms:
    """What receivers must know to unpack: structure around the tensors, and dtype and shape of each, per process."""

    skeleton: Any
    signatures: tuple[Any, ...]
    capacity: int


class Rounds:
    """Both ends of the line; every process makes one for each iteration.

    Args:
        state: The process; the first one reads.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._wire = transport_of(state).wire_device(state)
        self._terms: Terms | None = None
        self._agreed: Any = None  # what the reader compares a round with
        self._capacity = FIRST_CAPACITY_BYTES
        self._buffer = self._new_buffer()
        self._rows: list[torch.Tensor] | None = None
        self._in_flight: Any = None

    def _new_buffer(self) -> torch.Tensor:
        return torch.zeros(self._capacity, dtype=torch.uint8, device=self._wire)

    # ---- reading side -------------------------------------------------------------------------------------------

    def send(self, shares: Sequence[Any], is_last: bool, num_samples: int) -> Share:
        """Send every process its share; returns the reader's own.

        Args:
            shares: Nested tensors, one for each process.
            is_last: Whether the stream ends with this round.
            num_samples: Real samples of all shares together.

        Raises:
            TypeError: When a share holds something other than tensors.
        """
        try:
            flat = [flatten(share, "the dispatching data loader") for share in shares]
        except TypeError as error:  # the others are waiting
            self.send_error(error)
            raise
        agreed = [(structure, signature_of(leaves)) for leaves, structure in flat]
        if agreed != self._agreed:
            self._send_terms(shares, agreed)
        rows = self._free_rows()
        header = torch.tensor([DATA, int(is_last), num_samples], dtype=torch.int64).view(torch.uint8)
        for row, (leaves, _), (_, signature) in zip(rows, flat, agreed, strict=True):
            row[: header.numel()] = header
            layout = layout_of(signature)
            row[HEADER_BYTES : HEADER_BYTES + layout.num_bytes] = pack(
                [leaf.to(self._wire) for leaf in leaves], layout
            )
        self._scatter(rows)
        return Share(shares[self._state.process_index], is_last, num_samples)

    def _send_terms(self, shares: Sequence[Any], agreed: list[Any]) -> None:
        needed = HEADER_BYTES + max(layout_of(signature).num_bytes for _, signature in agreed)
        capacity = max(self._capacity, 1 << (needed - 1).bit_length())
        skeleton = rebuild(shares[0], iter(range(len(agreed[0][1]))))
        terms = Terms(skeleton, tuple(signature for _, signature in agreed), capacity)
        self._announce(TERMS)
        dist.broadcast_object_list([terms], src=self._state.process_index, device=self._wire)
        self._take(terms)
        self._agreed = agreed

    def send_end(self) -> None:
        """Say that there is nothing (more) to read."""
        self._announce(END)

    def send_error(self, error: Exception) -> None:
        """Let the other processes raise the same error."""
        self._announce(ERROR)
        try:
            pickle.loads(pickle.dumps(error))  # classes with arguments of their own are often written, but not read
            sendable: Exception = error
        except Exception:  # an error that cannot travel goes as its text
            sendable = RuntimeError(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list([sendable], src=self._state.process_index, device=self._wire)

    def _announce(self, what: int) -> None:
        rows = self._free_rows()
        header = torch.tensor([what], dtype=torch.int64).view(torch.uint8)
        for row in rows:
            row[: header.numel()] = header
        self._scatter(rows)

    def _free_rows(self) -> list[torch.Tensor]:
        self.finish()
        if self._rows is None:
            self._rows = [self._new_buffer() for _ in range(self._state.num_processes)]
        return self._rows

    def _scatter(self, rows: list[torch.Tensor]) -> None:
        """Start sending; the reader goes on reading meanwhile."""
        self._in_flight = dist.scatter(self._buffer, rows, src=self._state.process_index, async_op=True)

    def finish(self) -> None:
        """Wait until what was sent last has left, so that its buffers can be used again."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None

    # ---- receiving side -----------------------------------------------------------------------------------------

    def receive(self, reader: int = 0) -> Share | None:
        """This process's share of the next round; None when there is none.

        Raises:
            Exception: What the reader raised while reading.
        """
        while True:
            dist.scatter(self._buffer, src=reader)
            header = self._buffer[:HEADER_BYTES].view(torch.int64).tolist()
            if header[0] == DATA:
                return self._unpack(is_last=bool(header[1]), num_samples=header[2])
            if header[0] == END:
                return None
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=reader, device=self._wire)
            if header[0] == ERROR:
                raise received[0]
            self._take(received[0])

    def _take(self, terms: Terms) -> None:
        self._terms = terms
        if terms.capacity != self._capacity:
            self._capacity = terms.capacity
            self._buffer, self._rows = self._new_buffer(), None

    def _unpack(self, is_last: bool, num_samples: int) -> Share:
        assert self._terms is not None
        layout = layout_of(self._terms.signatures[self._state.process_index])
        leaves = unpack(self._buffer[HEADER_BYTES : HEADER_BYTES + layout.num_bytes], layout)
        return Share(_fill(self._terms.skeleton, leaves), is_last, num_samples)


def _fill(skeleton: Any, leaves: list[torch.Tensor]) -> Any:
    """Put leaves where the skeleton has their numbers."""
    from accel_ops.nested import recursively_apply

    return recursively_apply(lambda number: leaves[number], skeleton, test_type=lambda item: isinstance(item, int))
