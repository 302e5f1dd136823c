"""Samplers: finding a loader's, and one whose order depends on seed and epoch alone."""

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
