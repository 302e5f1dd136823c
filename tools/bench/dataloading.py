"""Data loading on two gloo ranks: dispatching against every process reading for itself, and how often a stream is read."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench.reference import run_on_ranks
from tools.bench.row import Row

PAIRS = 15
ROUNDS = 300
BATCH = 32
WIDTH = 64
SAMPLES = 1000
WORLD = 2


def rows(reference: Path) -> list[Row]:
    """Measure our loaders and the reference's, each against its own shard mode in the same two processes."""
    mine, theirs = run_on_ranks(sys.executable, __file__), run_on_ranks(reference, __file__)
    found = []
    for what, key in (("reading sample by sample", "samples"), ("reading whole batches", "batches")):
        ours, other = mine[key], theirs[key]
        found.append(
            Row(
                f"dispatch loader, batches/s of a process, 2 ranks, {what}; shard mode over it",
                "/s",
                ours["dispatch"],
                other["dispatch"],
                ours["shard"],
                ours["shard"] / ours["dispatch"],
                1.3,
            )
        )
    reads, other_reads = mine["reads"], theirs["reads"]
    found.append(
        Row(
            f"samples read of a stream of {SAMPLES} that can be divided, 2 ranks",
            "",
            reads,
            other_reads,
            SAMPLES,
            reads / SAMPLES,
            1.0,
        )
    )
    return found


def worker() -> None:
    """One rank: time both loaders by turns, count reads, and let rank 0 print."""
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)

    class Batches(Dataset):  # type: ignore[type-arg]
        """Items that are whole batches already, as memory-mapped tokens are; reading one costs little."""

        def __len__(self) -> int:
            return ROUNDS * WORLD

        def __getitem__(self, index: int) -> torch.Tensor:
            return data[index * BATCH : (index + 1) * BATCH]

    class Stream(IterableDataset):  # type: ignore[type-arg]
        """Counts what it reads; can be divided in the way of Hugging Face's datasets."""

        num_shards = n_shards = 8

        def __init__(self, samples: range) -> None:
            self.samples = samples
            self.num_read = 0

        def shard(self, num_shards: int, index: int) -> Stream:
            return Stream(self.samples[index::num_shards])

        def __iter__(self) -> Iterator[int]:
            for sample in self.samples:
                self.num_read += 1
                yield sample

    data = torch.randn(ROUNDS * WORLD * BATCH, WIDTH)
    plain = {
        "samples": DataLoader(TensorDataset(data), batch_size=BATCH),
        "batches": DataLoader(Batches(), batch_size=1, collate_fn=lambda items: items[0]),
    }
    found: dict[str, Any] = {}
    for key, loader in plain.items():
        shard, dispatch = (
            prepare_data_loader(loader, accelerator.device, put_on_device=True, dispatch_batches=choice)
            for choice in (False, True)
        )
        best = compare(accelerator, shard, dispatch)
        found[key] = {"shard": ROUNDS / best[0], "dispatch": ROUNDS / best[1]}

    stream = Stream(range(SAMPLES))
    prepared = prepare_data_loader(DataLoader(stream, batch_size=10), dispatch_batches=False)
    for _ in prepared:
        pass
    reader = prepared.dataset if hasattr(prepared.dataset, "num_read") else prepared.dataset.dataset
    num_read = accelerator.reduce(torch.tensor([reader.num_read])).item()
    if accelerator.is_main_process:
        print(json.dumps(found | {"reads": num_read}), flush=True)
    accelerator.wait_for_everyone()


def compare(accelerator: Any, first: Any, second: Any) -> list[float]:
    """The best seconds of each loader for one pass, by turns."""
    best = [float("inf")] * 2
    for pair in range(PAIRS):
        for which in (0, 1) if pair % 2 else (1, 0):
            accelerator.wait_for_everyone()
            begin = time.perf_counter()
            for _ in (first, second)[which]:
                pass
            accelerator.wait_for_everyone()
            best[which] = min(best[which], time.perf_counter() - begin)
    return best


def main() -> None:
    """Print the rows."""
    from tools.bench.reference import reference_python
    from tools.bench.row import table

    print(table(rows(reference_python())))


if __name__ == "__main__":
    worker()
