"""The process group of one pipeline, and which rank holds which stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_integrations.parallel.pipeline.shapes import TensorShape
from accel_integrations.parallel.wire import as_sent
from accel_state.supervision import report_progress


@dataclass(frozen=True)
class PipelineGroup:
    """The process group of one pipeline, and which rank in it holds which stage.

    Attributes:
        process_group: The ranks of the pipeline.
        num_stages: How many stages they hold: rank r has the stages r, r + size, ...
        device: The device of this rank.
    """

    process_group: dist.ProcessGroup
    num_stages: int
    device: torch.device

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.process_group.size()

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline."""
        return self.process_group.rank()

    @property
    def held(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(range(self.rank, self.num_stages, self.size))

    @property
    def last_rank(self) -> int:
        """The rank with the last stage."""
        return self.rank_of(self.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        """The rank with a stage."""
        return stage % self.size

    def receive_in_order(self, orders: Iterable[tuple[Sequence[TensorShape], int]]) -> Iterator[list[torch.Tensor]]:
        """Receive tensors from ranks with other stages, while the caller computes with those that came before.

        Each receive is posted before the one before it is waited for. A rank with several stages posts it only when the
        caller asks: it may receive from the rank to which it has to send first, and backends run the operations of two
        ranks in the order in which they were posted.

        Args:
            orders: Shapes of the tensors that come together, and the stage that sends them.

        Yields:
            Tensors on the device of this rank, for each order.
        """
        before: tuple[list[torch.Tensor], list[Any]] | None = None
        for shapes, stage in orders:
            posted = self._post_receive(shapes, stage)
            if len(self.held) > 1:
                yield _arrived(*posted)
                continue
            if before is not None:
                yield _arrived(*before)
            before = posted
        if before is not None:
            yield _arrived(*before)

    def _post_receive(self, shapes: Sequence[TensorShape], stage: int) -> tuple[list[torch.Tensor], list[Any]]:
        tensors = [shape.empty(self.device) for shape in shapes]
        source = self.rank_of(stage)
        return tensors, [dist.irecv(as_sent(tensor), group=self.process_group, group_src=source) for tensor in tensors]

    def send(self, tensors: Sequence[torch.Tensor], stage: int) -> tuple[list[Any], list[torch.Tensor]]:
        """Send tensors to the rank with another stage.

        Returns:
            The works to wait for, and what they send, which must be kept alive until then.
        """
        report_progress()
        buffers = [as_sent(tensor.resolve_conj().resolve_neg().contiguous()) for tensor in tensors]
        target = self.rank_of(stage)
        return [dist.isend(tensor, group=self.process_group, group_dst=target) for tensor in buffers], buffers

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Broadcast a contiguous tensor, in place."""
        dist.broadcast(as_sent(tensor), group=self.process_group, group_src=source)

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Broadcast a picklable object; returns that of the source."""
        box = [value]
        dist.broadcast_object_list(box, group=self.process_group, group_src=source, device=self.device)
        return box[0]


def _arrived(tensors: list[torch.Tensor], works: Sequence[Any]) -> list[torch.Tensor]:
    report_progress()
    for work in works:
        work.wait()
    return tensors
