"""The columns of the table: what a program does with an `Accelerator`, one function each."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

from accel_integrations.training_state.parallel_writer import ParallelFolderWriter
from accelerate import Accelerator, gathering
from tests.cuda_shapes.recorder import Recorder, Report
from tests.cuda_shapes.rows import BATCH, ROWS, Row, build
from tests.support.tiny_transformer import Tokens

gathering._num_looked_at = gathering.NUM_LOOKED_AT  # the first results of a run are compared on the host

ACCUMULATION = 2
WARM_UP = 3  # windows: DDP rebuilds its buckets in the second one, optimizers make their states in the first
LARGE, MANY = 1 << 20, 8  # float32: 4 MiB in one tensor, or 0.5 MiB in each of eight


class Program:
    """A training program of one row.

    Args:
        row: Its engine.
        world: The number of processes.
        folder: Where it saves.
    """

    def __init__(self, row: Row, world: int, folder: Path) -> None:
        self.row, self.world, self.folder = row, world, folder
        self.accelerator = Accelerator(
            gradient_accumulation_steps=ACCUMULATION,
            **row.settings(world),
        )
        self.device = self.accelerator.device
        self.model: Any = build()
        self.model_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        loader = DataLoader(Tokens(BATCH * world * 4), batch_size=BATCH, pin_memory=True, drop_last=True)
        self.loader: Any = loader

    # ---- training -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        prepared = self.accelerator.prepare(self.model, self.optimizer, self.loader, self.scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.inputs = [self.row.batch(self.world, self.device) for _ in range(ACCUMULATION)]

    def step(self) -> None:
        """An accumulation window: two micro-batches, gradients clipped, optimizer and scheduler stepped."""
        accelerator = self.accelerator
        for inputs in self.inputs:
            batch = {name: one.clone() for name, one in inputs.items()}
            with accelerator.accumulate(self.model), self.row.around_step(accelerator, batch):
                self.loss = self.row.loss(accelerator, self.model, batch)
                accelerator.backward(self.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.step()

    def batches(self) -> None:
        """A whole epoch of the prepared loader, from pinned memory."""
        for batch in self.loader:
            assert batch["input_ids"].device.type == "cuda"

    def evaluate(self) -> None:
        """A forward pass without gradients, and its predictions gathered."""
        self.model.eval()
        batch = {name: one.clone() for name, one in self.inputs[0].items()}
        with torch.no_grad(), self.row.around_step(self.accelerator, batch):
            loss = self.row.loss(self.accelerator, self.model, batch)
        self.accelerator.gather_for_metrics(loss.reshape(1))
        self.model.train()

    # ---- collectives --------------------------------------------------------------------------------------------

    def gather_scalar(self) -> None:
        actual = self.accelerator.gather(self.loss.detach())
        assert actual.numel() == self.world

    def gather_for_metrics(self) -> None:
        """What an evaluation gathers: predictions and labels."""
        data = (torch.ones(BATCH, 16, device=self.device), torch.ones(BATCH, dtype=torch.int64, device=self.device))
        actual = self.accelerator.gather_for_metrics(data)
        assert actual[0].shape[0] in {
            BATCH * ranks for ranks in range(1, self.world + 1)
        }  # not those of one replica twice

    def gather_large(self) -> dict[str, int]:
        data = torch.ones(LARGE // 64, device=self.device)
        assert self.accelerator.gather(data).numel() == data.numel() * self.world
        return {"bytes": data.nbytes * self.world}

    def gather_nested(self) -> dict[str, int]:
        data = {str(index): torch.ones(LARGE // 512, device=self.device) for index in range(MANY)}
        assert self.accelerator.gather(data)["0"].numel() == data["0"].numel() * self.world
        return {"bytes": sum(one.nbytes for one in data.values()) * self.world}

    def reduce_scalar(self) -> None:
        self.accelerator.reduce(self.loss.detach(), "mean")

    def reduce_many(self) -> dict[str, int]:
        data = [torch.ones(LARGE // MANY, device=self.device) for _ in range(MANY)]
        self.accelerator.reduce(data, "mean")
        return {"bytes": sum(one.nbytes for one in data)}

    def broadcast(self) -> None:
        from accelerate.utils import broadcast

        broadcast([torch.ones(16, device=self.device), self.loss.detach()])

    def pad_across_processes(self) -> None:
        actual = self.accelerator.pad_across_processes(torch.ones(BATCH, 16, device=self.device), dim=1)
        assert actual.shape == (BATCH, 16)

    def gather_object(self) -> None:
        from accelerate.utils import gather_object

        assert len(gather_object(["one"])) == self.world

    # ---- states -------------------------------------------------------------------------------------------------

    def get_state_dict(self) -> None:
        state = self.accelerator.get_state_dict(self.model)
        assert sum(one.nbytes for one in state.values()) >= self.model_bytes

    def save_model(self) -> None:
        publish = ParallelFolderWriter.publish
        # the other ranks are like this one, so what they wrote together is not the model
        with patch.object(ParallelFolderWriter, "publish", lambda joint, _: publish(joint, joint.num_bytes)):
            self.accelerator.save_model(self.model, str(self.folder / "model"))
        assert (self.folder / "model/model.safetensors").exists()

    def save_state(self) -> None:
        self.accelerator.save_state(str(self.folder / "state"))

    def load_state(self) -> None:
        self.accelerator.load_state(str(self.folder / "state"))

    def free_memory(self) -> None:
        """All that the program has goes; what is kept then is somebody else's reference."""
        freed = self.model, self.optimizer, self.loader, self.scheduler
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.free_memory(*freed)
        del freed
        self.inputs.clear()
        self.loss = torch.zeros(())


COLUMNS = (
    "prepare", "warm_up", "step", "batches", "evaluate", "gather_scalar", "gather_for_metrics", "gather_large",
    "gather_nested", "reduce_scalar", "reduce_many", "broadcast", "pad_across_processes", "gather_object", "get_state_dict",
    "save_model", "save_state", "load_state", "free_memory",
)  # fmt: skip
TWICE = (
    "batches",
    "evaluate",
    "gather",
    "reduce",
    "broadcast",
    "pad",
)  # what a program does often: caches may fill first


def run_row(name: str, world: int, folder: Path) -> dict[str, Any]:
    """All columns of one row, in the process of rank 0."""
    reports = {}
    with Recorder() as recorder:
        program = Program(ROWS[name], world, folder)
        for column in COLUMNS:
            if column in ROWS[name].skipped:
                continue
            report = reports[column] = Report()
            before = torch.cuda.memory_allocated()
            _record(recorder, report, getattr(program, column), twice=column.startswith(TWICE))
            report.note |= {"model bytes": program.model_bytes, "bytes on the GPU": before}
    return {column: report.as_json() for column, report in reports.items()}


def _record(recorder: Recorder, report: Report, operation: Callable[[], dict[str, int] | None], twice: bool) -> None:
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of torch's own code
            warnings.filterwarnings("error", module=r"accel.*|tests\.cuda_shapes\..*")
            if twice:
                operation()
            with recorder.recording(report):
                report.note = operation() or {}
    except BaseException:
        report.error = traceback.format_exc()
    report.seconds = time.perf_counter() - begin
