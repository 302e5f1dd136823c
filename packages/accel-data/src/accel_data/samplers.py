"""Samplers: finding a loader's, one whose order depends on seed and epoch alone, and one without its first batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from accel_ops.random import common_seed
from accel_state.public_names import known_as


@known_as("accelerate.data_loader.SeedableRandomSampler")
class SeedableRandomSampler(RandomSampler):
    """A random sampler that shuffles by seed plus epoch: in the same order on all processes, and after a restart.

    Args:
        args: For `RandomSampler`.
        data_seed (`int`, *optional*): The seed; torch's initial seed when None, without what
            `set_seed(device_specific=True)` added for this process.
        kwargs: For `RandomSampler`.
    """

    initial_seed: int
    epoch: int
    generator: torch.Generator | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = data_seed if data_seed is not None else common_seed()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of that epoch for the next iteration."""
        self.epoch = epoch


@known_as("accelerate.data_loader.SkipBatchSampler")
class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches; their samples are never read.

    Args:
        batch_sampler: Yields lists of indices.
        skip_batches (`int`): The number of batches to skip.
    """

    num_kept = 0  # of the class, because one that accelerate 1.15 has pickled has none

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.kept: list[list[int]] = []

    def keep_first(self, num_batches: int) -> None:
        """Keep the first batches of every epoch in `kept`, skipped or not: the last global batch is padded with them."""
        self.num_kept = num_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # while a copy is being restored
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[list[int]]:
        self.kept = []
        for index, batch in enumerate(self.batch_sampler):
            if index < self.num_kept:
                self.kept.append(list(batch))
            if index >= self.skip_batches:
                yield batch

    @property
    def total_length(self) -> int:
        """The number of batches, including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices behind a loader; None for an iterable dataset."""
    batches = batch_sampler_of(dataloader)
    return getattr(batches, "sampler", None)


def batch_sampler_of(dataloader: Any) -> Any:
    """The object that yields lists of indices: the batch sampler, or a sampler that does so itself."""
    return dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler


def innermost(sampler: Any) -> Any:
    """The user's own batch sampler inside shards and skips."""
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


def index_sampler(dataloader: Any) -> Any:
    """The user's own sampler of single indices, inside shards and skips; None where there is none."""
    return getattr(innermost(batch_sampler_of(dataloader)), "sampler", None) or get_sampler(dataloader)


def without_first(dataloader: Any, num_batches: int) -> tuple[SkipBatchSampler, dict[str, Any]]:
    """The order of a loader without its first batches.

    Args:
        dataloader: A loader of an indexed dataset.
        num_batches: How many batches of its batch sampler to leave out; samples, where it has none.

    Returns:
        The sampler that leaves them out, and the arguments of a `DataLoader` that reads by it.
    """
    if isinstance(dataloader.sampler, BatchSampler) or dataloader.batch_sampler is None:
        skipping = SkipBatchSampler(dataloader.sampler, skip_batches=num_batches)
        return skipping, {"sampler": skipping, "batch_size": dataloader.batch_size}
    skipping = SkipBatchSampler(dataloader.batch_sampler, skip_batches=num_batches)
    return skipping, {"batch_sampler": skipping}
