"""What every process of two sees of the same loaders: shares, dispatched batches, remainders, order over epochs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from record import RANK, done, record
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.size))


class Ragged(list):
    """Batches of any size, as a sampler of long and short sequences makes them."""


def collate(items: list[Any]) -> dict[str, Any]:
    numbers = torch.stack([torch.as_tensor(item) for item in items])
    return {"x": numbers, "pair": (numbers * 2, [numbers.float()[:, None].expand(-1, 2)])}


def kinds(size: int, batch: int, drop_last: bool) -> dict[str, DataLoader]:
    data = list(range(size))
    options = {"batch_size": batch, "drop_last": drop_last}
    return {
        "sequential": DataLoader(data, **options),
        "shuffled": DataLoader(data, shuffle=True, **options),
        "own": DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(11), **options),
        "batch_sampler": DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), batch, drop_last)),
        "stream": DataLoader(Stream(size), **options),
        "nested": DataLoader(data, collate_fn=collate, **options),
    }


def look(accelerator: Accelerator, name: str, loader: Any) -> None:
    """Record everything that a training loop can see of one epoch."""
    batches, gathered, remainders = [], [], []
    for batch in loader:
        state = accelerator.gradient_state
        batches.append([batch, state.end_of_dataloader])
        remainders.append(state.remainder)
        gathered.append(accelerator.gather_for_metrics(batch))
    record(f"batches {name}", lambda: batches)
    record(f"gathered {name}", lambda: gathered)
    record(f"remainder {name}", lambda: remainders[-1:])
    record(f"remainders {name}", lambda: remainders[:-1])


def epochs() -> None:
    cases = itertools.product((None, False, True), (False, True), (True, False), (False, True))
    for dispatch, split, even, seedable in cases:
        configuration = DataLoaderConfiguration(
            dispatch_batches=dispatch, split_batches=split, even_batches=even, use_seedable_sampler=seedable,
            data_seed=3 if seedable else None,
        )  # fmt: skip
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        for size, batch, drop_last in ((8, 2, False), (8, 2, True), (11, 2, False), (11, 4, True), (13, 4, False)):
            for kind in kinds(4, 2, False):
                if not even and not dispatch and size % (batch if split else 2 * batch) and not drop_last:
                    continue  # processes get unequal shares: gathering them hangs, see `uneven`
                name = f"{kind} {dispatch=} {split=} {even=} {seedable=} {size=} {batch=} {drop_last=}"
                set_seed(5 + RANK)  # processes that drew different numbers before

                loader = accelerator.prepare(kinds(size, batch, drop_last)[kind])
                for epoch in ("first", "second"):
                    look(accelerator, f"{name} {epoch}", loader)
                loader.set_epoch(4)
                look(accelerator, f"{name} fourth", loader)


def uneven() -> None:
    """Shares of unequal length, without collectives."""
    for split, size, batch in itertools.product((False, True), (5, 7, 9, 11, 14), (2, 4)):
        configuration = DataLoaderConfiguration(even_batches=False, split_batches=split)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        model = accelerator.prepare(torch.nn.Linear(1, 1))

        def see(accelerator=accelerator, size=size, batch=batch):
            loader = accelerator.prepare(kinds(size, batch, False)["sequential"])
            return [list(loader), len(loader), loader.total_batch_size]

        record(f"uneven {split=} {size=} {batch=}", see)
        with accelerator.join_uneven_inputs([model], even_batches=True):
            record(f"uneven_joined {split=} {size=} {batch=}", see)


def ragged() -> None:
    accelerator = Accelerator(cpu=True)
    for sizes in ([1, 2, 4, 1], [2, 1, 3], [3], [1, 1, 2, 2, 5]):

        def see(sizes=sizes):
            ends = list(itertools.accumulate(sizes, initial=0))
            batches = Ragged(list(range(a, b)) for a, b in itertools.pairwise(ends))
            loader = accelerator.prepare(DataLoader(list(range(ends[-1])), batch_sampler=batches))
            return [[batch.tolist() for batch in loader], len(loader)]

        record(f"ragged {sizes}", see)


def skipped() -> None:
    for dispatch, size, number in itertools.product((False, True), (8, 11), (0, 1, 2, 3)):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))

        set_seed(0)
        loader = accelerator.prepare(kinds(size, 2, False)["shuffled"])
        look(accelerator, f"skipped {dispatch=} {size=} {number=}", skip_first_batches(loader, number))
        look(accelerator, f"after_skipped {dispatch=} {size=} {number=}", loader)


def objects() -> None:
    """Metrics that are not tensors."""
    accelerator = Accelerator(cpu=True)
    for size, as_object in itertools.product((6, 7, 8, 9), (True, False)):

        def see(size=size, as_object=as_object):
            loader = accelerator.prepare(DataLoader([str(n) for n in range(size)], batch_size=2))
            return [accelerator.gather_for_metrics(batch, use_gather_object=as_object) for batch in loader]

        record(f"objects {size=} {as_object=}", see)

        def scalars(size=size):
            loader = accelerator.prepare(DataLoader(list(range(size)), batch_size=2))
            return [accelerator.gather_for_metrics((batch, batch.sum())) for batch in loader]

        record(f"with_scalar {size=} {as_object=}", scalars)


if __name__ == "__main__":
    epochs()
    uneven()
    ragged()
    skipped()
    objects()
    done()
    Accelerator().end_training()
