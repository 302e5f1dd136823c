"""Sharing out a stream that every process reads in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accel_state.public_names import known_as


@known_as("accelerate.data_loader.IterableDatasetShard")
class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process out of a stream that each process reads from the start.

    Samples are taken in rounds: of every `num_processes * batch_size` samples (or of `batch_size`, with
    `split_batches`) each process yields its consecutive part. The last round is filled up with the first samples,
    unless `drop_last` leaves it out.

    Args:
        dataset (`torch.utils.data.IterableDataset`): The stream; must be the same on all processes.
        batch_size (`int`): Of each process, or of all together with `split_batches`.
        drop_last (`bool`): Leave the last round out when it is not full.
        num_processes (`int`): Over how many processes.
        process_index (`int`): Which of them.
        split_batches (`bool`): Whether `batch_size` is that of all processes together.

    Raises:
        ValueError: When `split_batches` cannot divide the batch evenly.
    """

    dataset: Any
    batch_size: int
    drop_last: bool
    num_processes: int
    process_index: int
    split_batches: bool
    epoch: int

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes != 0:
            raise ValueError(
                f"split_batches=True cannot cut batches of {batch_size} evenly between {num_processes} processes: "
                f"choose a batch size that is a multiple of {num_processes}."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.last_round_size = -1
        """Real samples of the last round over all processes, once the stream has ended; 0 for a full one."""

    @property
    def total_length(self) -> int:
        """Samples over all processes."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch it is in, so that it shuffles anew."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        num_rounds, left = divmod(len(self.dataset), self.batch_size * self.num_processes)
        return (num_rounds + (left > 0 and not self.drop_last)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        round_size = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        share = round_size // self.num_processes
        own = slice(share * self.process_index, share * (self.process_index + 1))
        first: list[Any] | None = None
        current: list[Any] = []
        self.last_round_size = -1
        for sample in self.dataset:
            current.append(sample)
            if len(current) == round_size:
                yield from current[own]
                first = current if first is None else first
                current = []
        self.last_round_size = len(current)
        if current and not self.drop_last:
            first = list(current) if first is None else first
            while len(current) < round_size:
                current += first
            yield from current[own]
