"""Checks that metrics see every sample once, whatever the loader: `gather_for_metrics`.

By itself: `accelerate launch --num_processes 2 .../external_deps/test_metrics.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.test_utils.scripts.checks.check import Check, Process, make_accelerator, need_data_parallelism, same
from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.test_utils.scripts.checks.sentences import Sentences, make_reader

BATCH = 16


class Numbers(IterableDataset[int]):
    """Yields 0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def predictions(count: int, batch_size: int, **settings: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model says about sentences, gathered from all processes, and by itself."""
    accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(**settings))
    model = make_reader().eval()
    sentences = Sentences(count, seed=5)
    with torch.no_grad():
        expected = model(sentences.words)
        prepared, loader = accelerator.prepare(model, DataLoader(sentences, batch_size=batch_size))
        batches = [accelerator.gather_for_metrics(prepared(batch["input_ids"])) for batch in loader]
    return torch.cat(batches).cpu(), expected


def each_once(process: Process, *, dispatch_batches: bool, split_batches: bool, surplus: int) -> None:
    """Gathered predictions are those of one process, in the order of the data."""
    need_data_parallelism(process)
    size = BATCH * process.world if split_batches else BATCH
    count = 3 * BATCH * process.world + surplus
    gathered, expected = predictions(count, size, dispatch_batches=dispatch_batches, split_batches=split_batches)
    same(len(gathered), count, "number of predictions")
    assert torch.allclose(gathered, expected, atol=1e-5), "predictions differ from those of one process"


def correct(process: Process) -> None:
    """A metric is the same number as on one process."""
    need_data_parallelism(process)
    logits, expected = predictions(99, BATCH)
    labels = Sentences(99, seed=5).labels
    same((logits.argmax(-1) == labels).sum().item(), (expected.argmax(-1) == labels).sum().item(), "right predictions")


def streams(process: Process) -> None:
    """A stream that tells its length gives each item once, whoever reads it."""
    need_data_parallelism(process)
    for dispatch in (True, False):
        accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        loader = accelerator.prepare(DataLoader(Numbers(30), batch_size=4))
        batches = [accelerator.gather_for_metrics(batch) for batch in loader]
        same(sorted(torch.cat(batches).tolist()), list(range(30)), "items")


def objects(process: Process) -> None:
    """What is no tensor is gathered as a list, and without what was added to even it out."""
    need_data_parallelism(process)
    accelerator = make_accelerator()
    count = 2 * BATCH * process.world + 3
    loader: DataLoader[torch.Tensor] = accelerator.prepare(DataLoader(torch.arange(count), batch_size=BATCH))  # type: ignore[arg-type]
    batches = [accelerator.gather_for_metrics([f"item {number}" for number in batch.tolist()]) for batch in loader]
    same([word for batch in batches for word in batch], [f"item {number}" for number in range(count)], "items")


def dropping(process: Process) -> None:
    """With drop_last=True nothing is added, and so nothing is cut off again."""
    need_data_parallelism(process)
    accelerator: Accelerator = make_accelerator()
    count = 2 * BATCH * process.world + 5
    numbers: Any = torch.arange(count)
    loader: DataLoader[torch.Tensor] = accelerator.prepare(DataLoader(numbers, batch_size=BATCH, drop_last=True))
    samples = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    same(samples.tolist(), list(range(2 * BATCH * process.world)), "items")


def same_model(process: Process) -> None:
    """Processes that begin with other weights predict alike once the model is prepared."""
    need_data_parallelism(process)
    accelerator = make_accelerator()
    torch.manual_seed(process.rank)
    model = accelerator.prepare(nn.Linear(2, 2))
    with torch.no_grad():
        outputs: torch.Tensor = accelerator.gather(model(torch.ones(1, 2, device=accelerator.device)))
    assert torch.allclose(outputs, outputs[:1].expand_as(outputs)), f"predictions differ: {outputs.tolist()}"


METRICS = (
    *(
        Check(
            "metrics",
            f"{'dispatched' if dispatch else 'sharded'}, {'split' if split else 'whole'} batches, {surplus} left over",
            partial(each_once, dispatch_batches=dispatch, split_batches=split, surplus=surplus),
        )
        for dispatch, split, surplus in product((False, True), (False, True), (0, 1, 5))
    ),
    Check("metrics", "right predictions", correct),
    Check("metrics", "streams", streams),
    Check("metrics", "objects", objects),
    Check("metrics", "drop last", dropping),
    Check("metrics", "one model", same_model),
)


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(METRICS)


if __name__ == "__main__":
    sys.exit(main())
