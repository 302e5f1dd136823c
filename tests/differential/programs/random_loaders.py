"""Loaders chosen by chance: who reads what, what the loop knows, and what is gathered.

python random_loaders.py FIRST_SEED NUMBER
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from record import done, record
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, WeightedRandomSampler

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed


class Numbers(Dataset):
    """The numbers below a number, in items of some kind."""

    def __init__(self, count: int, kind: str) -> None:
        self.count, self.kind = count, kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        value = torch.tensor([index, index * 2])
        return {"tensor": value, "pair": (value, index), "mapping": {"x": value.float(), "name": f"item {index}"}}[
            self.kind
        ]


class Turned(Sampler):
    """An order of the program's own, another one in every epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index * 3 + self.epoch) % self.count for index in range(self.count)])

    def __len__(self) -> int:
        return self.count


@dataclass
class Program:
    """What chance has chosen."""

    samples: int
    batch_size: int
    kind: str
    order: str
    drop_last: bool
    split_batches: bool
    dispatches: bool
    even: bool
    seedable: bool
    accumulates: int
    epoch: int | None
    stops_early: bool

    @classmethod
    def by_chance(cls, seed: int) -> Program:
        chance = random.Random(seed)
        pick = chance.choice
        dispatches = pick([False, False, True])
        return cls(
            samples=pick([1, 2, 3, 5, 7, 8, 9, 12, 17]),
            batch_size=pick([2, 4]),
            kind=pick(["tensor", "pair"] if dispatches else ["tensor", "pair", "mapping"]),
            order=pick(["sequential", "shuffled", "generator", "turned", "weighted", "batch sampler"]),
            drop_last=not dispatches and pick([False, False, True]),
            split_batches=pick([False, False, True]),
            dispatches=dispatches,
            even=dispatches or pick([True, True, False]),
            seedable=pick([False, True]),
            accumulates=pick([1, 2]),
            epoch=pick([None, None, 0, 3]),
            stops_early=pick([False, False, False, True]),
        )

    @property
    def gathers(self) -> bool:
        """Whether all ranks have the same number of batches, of the same size."""
        return self.even and not self.drop_last and self.kind != "mapping" and not self.dispatches


def loader_of(program: Program) -> Any:
    data, count = Numbers(program.samples, program.kind), program.samples
    options: dict[str, Any] = {"batch_size": program.batch_size, "drop_last": program.drop_last}
    if program.order == "turned":
        options["sampler"] = Turned(count)
    elif program.order == "weighted":
        options["sampler"] = WeightedRandomSampler(torch.ones(count), count)
    elif program.order == "batch sampler":
        options = {"batch_sampler": BatchSampler(Turned(count), program.batch_size, program.drop_last)}
    elif program.order != "sequential":
        options["shuffle"] = True
        if program.order == "generator":
            options["generator"] = torch.Generator().manual_seed(3)
    return DataLoader(data, **options)


def run(program: Program) -> Any:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    settings = DataLoaderConfiguration(
        split_batches=program.split_batches,
        dispatch_batches=True if program.dispatches else None,
        even_batches=program.even,
        use_seedable_sampler=program.seedable,
    )
    accelerator = Accelerator(cpu=True, dataloader_config=settings, gradient_accumulation_steps=program.accumulates)
    set_seed(7)
    loader = accelerator.prepare(loader_of(program))
    seen: list[Any] = [len(loader)]
    if not program.dispatches:  # the loader of 1.15 has no such attributes then
        seen += [loader.total_batch_size, loader.total_dataset_length]
    if program.epoch is not None:
        loader.set_epoch(program.epoch)
    state = accelerator.gradient_state
    for epoch in range(2):
        for batch in loader:
            seen.append(
                [batch, state.end_of_dataloader, accelerator.gather_for_metrics(batch) if program.gathers else None]
            )
            if not program.dispatches:  # which knows its remainder earlier than in 1.15
                seen.append(state.remainder)
            if program.stops_early and epoch == 0:
                break
    return [*seen, state.in_dataloader]


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for chosen in range(first, first + count):
        made = Program.by_chance(chosen)
        record(f"{chosen} {asdict(made)}", lambda made=made: run(made))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    done()
