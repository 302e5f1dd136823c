"""Which samples every process of many gets, without any process group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from record import done, record
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import (
    BatchSamplerShard,
    IterableDatasetShard,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
)

SWITCHES = list(itertools.product((False, True), repeat=3))


class Stream(IterableDataset):
    """A stream of `size` numbers, with or without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Shuffled(Stream):
    """A stream whose order follows its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())


def batches(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def batch_shards() -> None:
    for size, batch, (drop_last, even, split), world in itertools.product(
        (0, 1, 2, 3, 5, 8, 12, 15, 16, 23, 24, 25), (1, 2, 3, 4, 6), SWITCHES, (1, 2, 3, 4)
    ):
        for rank in range(world):
            name = f"BatchSamplerShard {size=} {batch=} {drop_last=} {even=} {split=} {rank}/{world}"

            def see(size=size, batch=batch, drop_last=drop_last, even=even, split=split, rank=rank, world=world):
                sampler = BatchSampler(range(size), batch, drop_last)
                shard = BatchSamplerShard(sampler, world, rank, split_batches=split, even_batches=even)
                return {"batches": list(shard), "length": len(shard), "total": shard.total_length, "split": split}

            record(name, see)


def odd_batch_shards() -> None:
    """Batch samplers whose batches have any size, which they do not tell."""
    generator = torch.Generator().manual_seed(3)
    for number in range(60):
        sizes = torch.randint(1, 5, (int(torch.randint(0, 9, (), generator=generator)),), generator=generator).tolist()
        chunks = list(itertools.accumulate(sizes, initial=0))
        given = [list(range(a, b)) for a, b in itertools.pairwise(chunks)]
        for world, even in ((2, False), (3, False), (2, True), (3, True)):
            for rank in range(world):
                record(
                    f"odd_batches {number} {even=} {rank}/{world}",
                    lambda given=given, world=world, rank=rank, even=even: list(
                        BatchSamplerShard(list(map(list, given)), world, rank, even_batches=even)
                    ),
                )


def stream_shards() -> None:
    for size, batch, drop_last, split, world in itertools.product(
        (0, 1, 3, 4, 7, 8, 13, 16, 24), (1, 2, 3, 4), (False, True), (False, True), (1, 2, 3, 4)
    ):
        for rank in range(world):
            name = f"IterableDatasetShard {size=} {batch=} {drop_last=} {split=} {rank}/{world}"

            def see(size=size, batch=batch, drop_last=drop_last, split=split, rank=rank, world=world):
                shard = IterableDatasetShard(Stream(size), batch, drop_last, world, rank, split)
                return list(shard)

            record(name, see)


def kinds(size: int, batch: int, drop_last: bool) -> dict[str, DataLoader]:
    """One loader of each kind that users write."""
    data = list(range(size))

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(7)

    return {
        "sequential": DataLoader(data, batch_size=batch, drop_last=drop_last),
        "shuffled": DataLoader(data, batch_size=batch, drop_last=drop_last, shuffle=True, generator=seeded()),
        "sampler": DataLoader(
            data, batch_size=batch, drop_last=drop_last, sampler=RandomSampler(data, generator=seeded())
        ),
        "reversed": DataLoader(data, batch_size=batch, drop_last=drop_last, sampler=data[::-1]),
        "batch_sampler": DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), batch, drop_last)),
        "stream": DataLoader(Stream(size), batch_size=batch, drop_last=drop_last),
        "unbatched": DataLoader(data, batch_size=None),
        "collated": DataLoader(data, batch_size=batch, drop_last=drop_last, collate_fn=lambda items: {"x": items}),
    }


def prepared() -> None:
    for size, batch, (drop_last, even, split), world in itertools.product(
        (1, 5, 8, 12, 17), (2, 4), SWITCHES, (1, 2, 4)
    ):
        for (kind, seedable), rank in itertools.product(
            itertools.product(kinds(4, 1, False), (False, True)), range(world)
        ):
            name = (
                f"prepare_data_loader {kind} {size=} {batch=} {drop_last=} {even=} {split=} {seedable=} {rank}/{world}"
            )

            def see(
                kind=kind, size=size, batch=batch, drop_last=drop_last, even=even, split=split, seedable=seedable,
                rank=rank, world=world,
            ):  # fmt: skip
                torch.manual_seed(0)
                loader = prepare_data_loader(
                    kinds(size, batch, drop_last)[kind],
                    num_processes=world, process_index=rank, split_batches=split, even_batches=even,
                    use_seedable_sampler=seedable, data_seed=5, rng_types=None, dispatch_batches=False,
                )  # fmt: skip
                seen: dict[str, Any] = {"first": batches(loader), "second": batches(loader)}
                loader.set_epoch(7)
                seen["seventh"] = batches(loader)
                seen["total length"] = _or_error(lambda: loader.total_dataset_length)
                seen["length"] = _or_error(lambda: len(loader))
                if hasattr(loader, "total_batch_size"):
                    record(
                        f"total_batch_size {kind} {size=} {batch=} {split=} {seedable=} {even=} {drop_last=} {rank}/{world}",
                        lambda: loader.total_batch_size,
                    )
                return seen

            record(name, see)


def _or_error(see: Any) -> Any:
    try:
        return see()
    except Exception as error:
        return type(error).__name__


def skipping() -> None:
    for (kind, size, skipped), (split, world) in itertools.product(
        itertools.product(kinds(4, 1, False), (5, 12), (0, 1, 2, 9)), ((False, 1), (False, 2), (True, 2))
    ):
        for rank in range(world):

            def see(kind=kind, size=size, skipped=skipped, split=split, world=world, rank=rank):
                torch.manual_seed(0)
                loader = prepare_data_loader(
                    kinds(size, 2, False)[kind], num_processes=world, process_index=rank, split_batches=split,
                    rng_types=None, dispatch_batches=False,
                )  # fmt: skip
                rest = skip_first_batches(loader, skipped)
                record(f"left over {kind} {size=} {skipped=} {split=} {rank}/{world}", lambda: len(rest))
                return {"rest": batches(rest), "again": batches(loader)}

            record(f"skip_first_batches {kind} {size=} {skipped=} {split=} {rank}/{world}", see)
    for size, batch, skipped in itertools.product((0, 5, 9), (1, 2), (0, 1, 3, 20)):
        plain_loader = DataLoader(range(size), batch_size=batch)
        record(
            f"skip_first_batches_plain {size=} {batch=} {skipped=}",
            lambda loader=plain_loader, skipped=skipped: batches(skip_first_batches(loader, skipped)),
        )
        sampler = SkipBatchSampler(BatchSampler(range(size), batch, False), skip_batches=skipped)
        record(f"SkipBatchSampler {size=} {batch=} {skipped=}", lambda s=sampler: [list(s), s.total_length])
        record(f"left over SkipBatchSampler {size=} {batch=} {skipped=}", lambda s=sampler: len(s))
        record(
            f"SkipDataLoader {size=} {batch=} {skipped=}",
            lambda args=(size, batch, skipped): batches(_skipping(*args)),
        )
        record(
            f"left over SkipDataLoader {size=} {batch=} {skipped=}",
            lambda a=(size, batch, skipped): len(_skipping(*a)),
        )


def _skipping(size: int, batch: int, skipped: int) -> SkipDataLoader:
    return SkipDataLoader(range(size), batch_size=batch, skip_batches=skipped)


def single_process() -> None:
    """Through the accelerator, with what it tells while iterating."""
    accelerator = Accelerator(cpu=True)
    cases = itertools.product(kinds(4, 1, False), (1, 5, 8), (2, 3), (False, True))
    for kind, size, batch, drop_last in sorted(cases, key=lambda case: case[0] == "stream" and case[3]):

        def see(kind=kind, size=size, batch=batch, drop_last=drop_last):
            torch.manual_seed(1)
            loader = accelerator.prepare(kinds(size, batch, drop_last)[kind])
            seen = []
            for given in loader:
                state = accelerator.gradient_state
                gathered = accelerator.gather_for_metrics(given)
                seen.append([given, gathered, state.end_of_dataloader, state.remainder, state.in_dataloader])
            return [seen, accelerator.gradient_state.in_dataloader, type(get_sampler(loader)).__name__]

        record(f"accelerator {kind} {size=} {batch=} {drop_last=}", see)
    stream = Shuffled(6)
    loader = accelerator.prepare(DataLoader(stream, batch_size=2))
    for epoch in (0, 1, 5):
        record(f"set_epoch {epoch}", lambda epoch=epoch: [loader.set_epoch(epoch), batches(loader), stream.epoch])


if __name__ == "__main__":
    batch_shards()
    odd_batch_shards()
    stream_shards()
    prepared()
    skipping()
    single_process()
    done()
