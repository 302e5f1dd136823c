"""Data loading on two gloo ranks: dispatching against every process reading for itself, and how often a stream is read."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.bench.row import Row
from tools.reference import run_on_ranks

TURNS = 15
ROUNDS = 300
BATCH = 32
WIDTH = 64
SAMPLES = 1000
WORLD = 2
KINDS = {
    "a stream that cannot be divided": "stream",
    "samples read one by one": "samples",
    "batches read whole": "batches",
}


def rows(reference: Path) -> list[Row]:
    """Measure our loaders and the reference's, each against its own shard mode in the same two processes."""
    mine, theirs = run_on_ranks(sys.executable, __file__), run_on_ranks(reference, __file__)
    found = []
    for what, key in KINDS.items():
        ours, other = mine[key], theirs[key]
        for floor, name in (("broadcast", "a hand-written loop with one flat broadcast"), ("shard", "shard mode")):
            found.append(
                Row(
                    f"dispatch loader, batches/s of a process, 2 ranks, {what}: {name} over it",
                    "/s",
                    ours["dispatch"],
                    other["dispatch"],
                    ours[floor],
                    ours[floor] / ours["dispatch"],
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
    import torch.distributed as dist
    from torch.utils.data import DataLoader, IterableDataset

    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)

    class Whole(IterableDataset):  # type: ignore[type-arg]
        """A stream that has no parts: in shard mode every process reads all of it and keeps its share."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(data)

    class Stream(IterableDataset):  # type: ignore[type-arg]
        """Counts what it reads; says how it is sharded, in the words of accelerate 1.15 and in ours."""

        num_shards = n_shards = 8

        def __init__(self, samples: range) -> None:
            self.samples = samples
            self.num_read = 0

        def shard(self, num_shards: int, index: int) -> Stream:
            return Stream(self.samples[index::num_shards])

        def split_for_process(self, index: int, count: int) -> Stream:
            return self.shard(count, index)

        def __iter__(self) -> Iterator[int]:
            for sample in self.samples:
                self.num_read += 1
                yield sample

    data = torch.randn(ROUNDS * WORLD * BATCH, WIDTH)
    plain = {
        "stream": DataLoader(Whole(), batch_size=BATCH),
        "samples": DataLoader(data, batch_size=BATCH),  # type: ignore[arg-type]
        "batches": DataLoader(data.split(BATCH), batch_size=1, collate_fn=lambda items: items[0]),
    }

    def broadcasting(loader: Any) -> Callable[[], Any]:
        """What one writes by hand: rank 0 reads for all and broadcasts; everybody takes its share."""
        buffer = torch.empty(WORLD * BATCH, WIDTH)
        own = slice(accelerator.process_index * BATCH, (accelerator.process_index + 1) * BATCH)

        def loop() -> None:
            batches = iter(loader) if accelerator.process_index == 0 else None
            for _ in range(ROUNDS):
                if batches is not None:
                    torch.cat([next(batches), next(batches)], out=buffer)
                dist.broadcast(buffer, src=0)
                buffer[own].clone()

        return loop

    found: dict[str, Any] = {}
    for key, loader in plain.items():
        shard, dispatch = (
            through(prepare_data_loader(loader, accelerator.device, put_on_device=True, dispatch_batches=choice))
            for choice in (False, True)
        )
        best = compare(accelerator, [shard, dispatch, broadcasting(loader)])
        names = ("shard", "dispatch", "broadcast")
        found[key] = {name: ROUNDS / seconds for name, seconds in zip(names, best, strict=True)}

    stream = Stream(range(SAMPLES))
    prepared = prepare_data_loader(DataLoader(stream, batch_size=10), dispatch_batches=False)
    for _ in prepared:
        pass
    reader = prepared.dataset if hasattr(prepared.dataset, "num_read") else prepared.dataset.dataset
    num_read = accelerator.reduce(torch.tensor([reader.num_read])).item()
    if accelerator.is_main_process:
        print(json.dumps(found | {"reads": num_read}), flush=True)
    accelerator.wait_for_everyone()


def through(loader: Any) -> Callable[[], None]:
    """A pass over a loader."""

    def loop() -> None:
        for _ in loader:
            pass

    return loop


def compare(accelerator: Any, loops: list[Callable[[], None]]) -> list[float]:
    """The median seconds of each loop, by turns."""
    taken: list[list[float]] = [[] for _ in loops]
    for turn in range(TURNS):
        for which in range(len(loops)) if turn % 2 else reversed(range(len(loops))):
            accelerator.wait_for_everyone()
            begin = time.perf_counter()
            loops[which]()
            accelerator.wait_for_everyone()
            taken[which].append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in taken]


def main() -> None:
    """Print the rows."""
    from tools.bench.row import table
    from tools.reference import reference_python

    print(table(rows(reference_python())))


if __name__ == "__main__":
    worker()
