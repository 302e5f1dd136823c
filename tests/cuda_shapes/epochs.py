"""Whole epochs of training from a prepared loader on a pretended GPU; each function is one task."""

from __future__ import annotations

import gc
from collections import UserDict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from tests.cuda_shapes.pretended_group import launch
from tests.cuda_shapes.recorder import DRIVER, Recorder, Report

SAMPLES, BATCH, WIDTH = 40, 4, 8
X = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Encoding(UserDict[str, torch.Tensor]):
    """A batch with a `to` of its own, as tokenizers return it."""

    def to(self, device: Any, *, non_blocking: bool = False) -> Encoding:
        self.data = {name: value.to(device=device, non_blocking=non_blocking) for name, value in self.data.items()}
        return self


class Graph:
    """A batch that only its own `to` can copy."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        return Graph(self.x.to(device, non_blocking=non_blocking), self.y.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Graph:
        return Graph(self.x.pin_memory(), self.y.pin_memory())


def _stacked(samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])


COLLATED: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda samples: torch.cat(_stacked(samples), dim=1),
    "tuple": _stacked,
    "dict": lambda samples: dict(zip("xy", _stacked(samples), strict=True)),
    "nested": lambda samples: {"inputs": [{"x": _stacked(samples)[0]}], "y": _stacked(samples)[1], "name": "train"},
    "encoding": lambda samples: Encoding(zip("xy", _stacked(samples), strict=True)),
    "graph": lambda samples: Graph(*_stacked(samples)),
}


def _parts(kind: str, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "tensor":
        return batch[:, :WIDTH], batch[:, WIDTH:]
    if kind == "graph":
        return batch.x, batch.y
    if kind == "tuple":
        return batch[0], batch[1]
    return batch["inputs"][0]["x"] if kind == "nested" else batch["x"], batch["y"]


def epoch(kind: str, options: Any, settings: Any, ranks: int, folder: str) -> dict[str, Any]:
    """An epoch with accumulation, clipping, bf16, gathered metrics and a scheduler.

    Args:
        kind: Of batches, in `COLLATED`.
        options: For `DataLoader`.
        settings: For `DataLoaderConfiguration`.
        ranks: The number of ranks of a launch; 0 for a program that is not launched.

    Returns:
        The report of the last epoch, whether all samples came as they are, and the device of batches.
    """
    options, settings = dict(options), dict(settings)  # lists of pairs: they came as JSON
    if ranks:
        launch(ranks, local_rank=min(ranks - 1, 3))
    with Recorder() as recorder:
        accelerator = Accelerator(
            gradient_accumulation_steps=2,
            mixed_precision="bf16",
            dataloader_config=DataLoaderConfiguration(**settings),
        )
        model = nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        loader = DataLoader(TensorDataset(X, Y), BATCH, collate_fn=COLLATED[kind], **options)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        report = Report()

        def train() -> list[torch.Tensor]:
            inputs = []
            for batch in loader:
                x, y = _parts(kind, batch)
                with accelerator.accumulate(model):
                    output = model(x)
                    accelerator.backward((output - y).square().mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accelerator.gather_for_metrics((output.detach(), y))
                inputs.append(x.clone())
            return inputs

        for _ in range(3):  # DDP makes its buckets anew after the first window, and the host waits for that
            train()
        with recorder.recording(report):
            inputs = train()
        expected = X if ranks <= 1 else X.view(-1, BATCH, WIDTH)[::ranks].reshape(-1, WIDTH)
        arrived = torch.cat(inputs).cpu()[: len(expected)]
        return report.as_json() | {
            "right": torch.equal(arrived, expected), "devices": sorted({str(x.device) for x in inputs}),
            "is wrapped": isinstance(model, nn.parallel.DistributedDataParallel),
        }  # fmt: skip


def reused_buffer(folder: str) -> dict[str, Any]:
    """A dataset that writes each sample to the same pinned memory: whether the host waited for the copy before."""
    with Recorder():
        buffer = torch.empty(1, WIDTH).pin_memory()
        loader = DataLoader(range(SAMPLES), 1, collate_fn=lambda indices: buffer.copy_(X[indices]))
        loader = Accelerator().prepare(loader)
        before = DRIVER.pretended_count(1)  # waits for events
        arrived = torch.cat([batch.clone() for batch in loader])
        return {"right": torch.equal(arrived.cpu(), X), "event waits": DRIVER.pretended_count(1) - before}


def order_of_streams(folder: str) -> list[str]:
    """What happens to the streams for one batch, which is copied on a stream of its own."""
    events: list[str] = []
    stream = torch.cuda.Stream
    record, wait = stream.record_event, stream.wait_event

    def computes(this: Any) -> str:
        return "computing" if this.stream_id == torch.cuda.default_stream().stream_id else "copying"

    def noted_record(this: Any, event: Any = None) -> Any:
        events.append(f"{computes(this)} stream: event")
        return record(this, event)

    def noted_wait(this: Any, event: Any) -> None:
        events.append(f"{computes(this)} stream: waits for it")
        wait(this, event)

    with Recorder() as recorder, patch.multiple(stream, record_event=noted_record, wait_event=noted_wait):

        def observe(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            name = func._schema.name.partition("::")[2]
            if name == "_to_copy":
                events.append(f"copy on the {computes(torch.cuda.current_stream())} stream")
            elif name == "record_stream":
                events.append(f"{computes(args[1])} stream: uses the memory")

        recorder.observe = observe
        for _ in Accelerator().prepare(DataLoader(X[:1], 1, pin_memory=True)):
            events.append("batch")
    return events


def streams_of_epochs(folder: str) -> int:
    """How many streams copy the batches of several epochs and loaders."""
    streams = set()
    with Recorder() as recorder:

        def observe(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            if func._schema.name == "aten::_to_copy":
                streams.add(torch.cuda.current_stream().stream_id)

        recorder.observe = observe
        accelerator = Accelerator()
        for _ in range(2):
            loader = accelerator.prepare(DataLoader(X, BATCH, pin_memory=True))
            for _ in range(3):
                list(loader)
    return len(streams)


def memory_of_batches(folder: str) -> dict[str, Any]:
    """The GPU memory that an epoch over large batches takes, in batches, at the peak and after it."""
    with Recorder() as recorder:
        data = torch.ones(8, 1 << 18)
        loader = Accelerator().prepare(DataLoader(TensorDataset(data), 1, pin_memory=True))
        report = Report()
        with recorder.recording(report):
            for (batch,) in loader:
                del batch
        gc.collect()
        return {"peak": report.peak_bytes / data[0].nbytes, "kept": report.kept_bytes}
