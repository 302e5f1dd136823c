"""Mistakes of data that one rank cannot see alone, and batches that cannot be moved."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_ops.placement import send_to_device
from accelerate import Accelerator
from tests.support.ranks import ranks


def split(seed: int | None) -> list[str]:
    """Prepare a loader of a split, and return the warnings of all ranks."""
    generator = torch.Generator().manual_seed(seed) if seed is not None else torch.default_generator
    training, _ = random_split(TensorDataset(torch.arange(40.0)), [30, 10], generator=generator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Accelerator(cpu=True).prepare(DataLoader(training, batch_size=5))
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, [str(warning.message) for warning in caught])
    return [message for of_rank in messages for message in of_rank if "subsets of different samples" in message]


@ranks(2)
def test_a_split_without_a_seed_is_warned_of_by_the_rank_that_comes_last(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    (message,) = set(split(None))
    assert message.startswith("Ranks 0 and 1 prepare subsets of different samples")
    assert split(7) == []
    torch.manual_seed(3)
    assert split(None) == []
    training, _ = random_split(TensorDataset(torch.arange(40.0)), [30, 10])
    if rank == 0:  # a loader of the main process alone waits for nobody
        Accelerator(cpu=True).prepare(DataLoader(training, batch_size=5))
    assert split(8) == []


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    name: str = ""


class Movable(Pair):
    def to(self, device: Any) -> Movable:
        return Movable(self.x.to(device), self.name)


def test_a_dataclass_that_stays_behind_is_named() -> None:
    with pytest.warns(UserWarning, match="Pair is a dataclass without a `to` method, so that its tensors stay on cpu"):
        send_to_device([Pair(torch.ones(2))], "meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert send_to_device({"a": Movable(torch.ones(2))}, "meta")["a"].x.device.type == "meta"
        batch = Pair(torch.ones(2))
        assert send_to_device(batch, "cpu") is batch
