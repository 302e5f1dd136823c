"""How much of an epoch is done, as a checkpoint stores it, and how many batches that is in another run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from torch.utils.data import IterableDataset

from accel_data.split_stream import SplitStream
from accel_state.logging import get_logger
from accel_state.processes import PartialState
from accel_state.warning import warn_user

logger = get_logger(__name__)


@dataclass(frozen=True)
class Position:
    """How much of an epoch is done.

    Attributes:
        batches: The number of batches that were yielded on each process.
        global_batch_size: Samples of one batch over all processes; None where it is unknown.
        num_processes: How many processes there were.
        num_samples: The length of the dataset; None for streams.
        num_workers: The worker processes that read; None where they are unknown.
    """

    batches: int
    global_batch_size: int | None = None
    num_processes: int | None = None
    num_samples: int | None = None
    num_workers: int | None = None

    @classmethod
    def of(cls, loader: Any, batches: int) -> Position:
        """The position of a prepared loader after so many batches of its epoch."""
        return cls(
            batches,
            _global_batch_size(loader),
            PartialState().num_processes,
            _num_samples(loader),
            getattr(loader, "num_workers", None),
        )

    @property
    def batch_size(self) -> int | None:
        """Samples of one batch of one process; None where it is unknown."""
        return None if self.global_batch_size is None else self.global_batch_size // (self.num_processes or 1)

    def state_dict(self) -> dict[str, int | None]:
        """The attributes, as plain data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """The position that `state_dict` described.

        Raises:
            ValueError: It describes none.
        """
        names = [field.name for field in fields(cls)]
        values = [state.get(name) for name in names] if isinstance(state, dict) else [None]
        if type(values[0]) is not int or values[0] < 0 or {type(value) for value in values} - {int, type(None)}:
            raise ValueError(f"{state!r} is not the position of a data loader. Load another checkpoint.")
        return cls(*values)

    def fits(self, loader: Any) -> bool:
        """Whether a prepared loader reads the same batches as the one whose position this is, in as many processes and workers."""
        return self == Position.of(loader, self.batches)

    def batches_in(self, loader: Any) -> int:
        """How many batches of a prepared loader hold the samples that were yielded.

        Args:
            loader: The loader; its global batch size may be another one than when the position was saved.

        Returns:
            Their number on each process; 0, with a warning, where the loader reads other data.
        """
        now = Position.of(loader, 0)
        if now.num_samples != self.num_samples:
            warn_user(
                f"The checkpoint was saved within an epoch of {self.num_samples} samples, and this data loader has "
                f"{now.num_samples}: it begins with a full epoch."
            )
            return 0
        if reads_own_shard(loader) and self.num_processes != now.num_processes:
            warn_user(
                f"The checkpoint was saved within an epoch of data that are sharded at their source, by {self.num_processes} "
                f"processes, and {now.num_processes} load it: their shards differ, so each begins with a full epoch."
            )
            return 0
        if self.global_batch_size is None or now.global_batch_size is None:
            done, size = self.batches * (self.num_processes or 1), now.num_processes or 1
        else:
            done, size = self.batches * self.global_batch_size, now.global_batch_size
        num_batches, again = divmod(done, size)
        if again:
            warn_user(
                f"The checkpoint was saved after {done} samples of an epoch, which is no multiple of this run's global batch "
                f"size of {size}: the last {again} of them come again. Choose a batch size per process so that it is one."
            )
        if num_batches and isinstance(loader.dataset, IterableDataset):
            self._warn_of_another_order(now)
            logger.warning(
                "The first %d batches of the epoch are read again and dropped, because a stream can only be read from its start.",
                num_batches,
            )
        return num_batches

    def _warn_of_another_order(self, now: Position) -> None:
        """Warn if a stream that workers share out comes in another order now: they take turns, with a whole batch each."""
        if self.num_workers is None or now.num_workers is None or max(self.num_workers, now.num_workers) < 2:
            return
        if (self.num_workers, self.batch_size) != (now.num_workers, now.batch_size):
            warn_user(
                f"The checkpoint was saved within an epoch of a stream with num_workers={self.num_workers} and "
                f"{self.batch_size} samples per batch, and this data loader has num_workers={now.num_workers} and "
                f"{now.batch_size}: if workers share out the stream, its order is another now, so that some samples come again "
                "and others are left out. Use the same until the epoch is over."
            )


def reads_own_shard(loader: Any) -> bool:
    """Whether the order of a loader is that of one process alone: its data were sharded at their source, or by the program."""
    return isinstance(loader.dataset, SplitStream) or getattr(loader, "num_own_shards", 1) > 1


def _global_batch_size(loader: Any) -> int | None:
    try:
        return int(loader.total_batch_size)
    except (AttributeError, TypeError):  # a batch sampler without batch_size, or no batches at all
        return None


def _num_samples(loader: Any) -> int | None:
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return int(loader.total_dataset_length)
    except (AttributeError, TypeError):
        return None
