"""Runs that go on under another engine: which training states load where?

    uv run --no-sync python -m tests.support.changed_engines [-v] [engine, or engine>engine ...]

prints a matrix, engines that saved by engines that loaded. A cell is a run of one engine whose state another one loads;
its next losses must be those of the run that kept its engine. An engine's number of ranks is part of its name. With
names, only cells from or to these engines are tried; `-v` prints the errors.

    =  the same, to 1e-6 of them    x  an error before anything changed
    !  other losses                 X  an error, and the run has changed
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_ops.modules import to_local
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig, PipelineParallelConfig, TorchTensorParallelConfig
from tests.support.leaks import reset_state
from tests.support.ranks import POOL
from tests.support.tiny_transformer import LENGTH, TP_PLAN, VOCABULARY, make_model, shift, token_loss

GLOBAL_BATCH = 8
STEPS_BEFORE_SAVING = 3
STEPS_COMPARED = 3
"""The first loss shows the weights, the second one the optimizer states, the third one the schedule."""
TOLERANCE = 1e-6

Settings = Callable[[], dict[str, Any]]


def fsdp_settings(
    version: int, form: str, *, flat: bool = False, strategy: str | None = None, **sizes: int
) -> Settings:
    """Arguments of `Accelerator` for FSDP; `flat` and `strategy` are version 1's."""

    def make() -> dict[str, Any]:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            state_dict_type=f"{form.upper()}_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            **({"use_orig_params": not flat, "sharding_strategy": strategy} if version == 1 else {}),
        )
        return {"fsdp_plugin": plugin, "parallelism_config": _mesh(**sizes) if sizes else None}

    return make


def _mesh(**sizes: int) -> ParallelismConfig:
    tensor = TorchTensorParallelConfig(plan=TP_PLAN) if "tp_size" in sizes else None
    pipeline = PipelineParallelConfig("gpipe") if "pp_size" in sizes else None
    return ParallelismConfig(**sizes, tp_handler=tensor, pp_handler=pipeline)


def _zero(stage: int) -> Settings:
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    return lambda: {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(config)))}


@dataclass(frozen=True)
class Engine:
    """An engine with its settings.

    Attributes:
        world: Number of ranks.
        settings: Makes the arguments of `Accelerator`.
        num_groups: The numbers of parameter groups that its optimizer can have.
    """

    world: int
    settings: Settings
    num_groups: tuple[int, ...] = (2, 1)


ENGINES: dict[str, Engine] = {
    "single": Engine(1, dict),
    "fsdp2-sharded@1": Engine(1, fsdp_settings(2, "sharded")),
    "zero2@1": Engine(1, _zero(2)),
    "zero3@1": Engine(1, _zero(3)),
    "ddp": Engine(2, dict),
    "fsdp2-full": Engine(2, fsdp_settings(2, "full")),
    "fsdp2-sharded": Engine(2, fsdp_settings(2, "sharded")),
    "fsdp1-full": Engine(2, fsdp_settings(1, "full")),
    "fsdp1-sharded": Engine(2, fsdp_settings(1, "sharded")),
    "fsdp1-flat-full": Engine(2, fsdp_settings(1, "full", flat=True), (1,)),
    "fsdp1-flat-sharded": Engine(2, fsdp_settings(1, "sharded", flat=True), (1,)),
    "tp": Engine(2, lambda: {"parallelism_config": _mesh(tp_size=2)}),
    "pp": Engine(2, lambda: {"parallelism_config": _mesh(pp_size=2)}),
    "zero0": Engine(2, _zero(0)),
    "zero1": Engine(2, _zero(1)),
    "zero2": Engine(2, _zero(2)),
    "zero3": Engine(2, _zero(3)),
    "hsdp": Engine(4, fsdp_settings(2, "sharded", dp_replicate_size=2, dp_shard_size=2)),
    "fsdp2+tp": Engine(4, fsdp_settings(2, "sharded", dp_shard_size=2, tp_size=2)),
    "ddp+pp": Engine(4, lambda: {"parallelism_config": _mesh(dp_replicate_size=2, pp_size=2)}),
    "fsdp2+pp": Engine(4, fsdp_settings(2, "sharded", dp_shard_size=2, pp_size=2)),
}


class Run:
    """A small training run with tied weights, a schedule, and parameter groups in another order than the model's.

    Args:
        engine: A key of `ENGINES`.
        num_groups: Number of parameter groups.
        seed: Of the weights; the run that loads begins with others.
        further: More arguments of `Accelerator`.
    """

    def __init__(self, engine: str, num_groups: int = 2, seed: int = 0, **further: Any) -> None:
        settings = ENGINES[engine].settings() | further
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True), **settings
        )
        model = make_model(seed=seed, tied=True, layers=2)
        named = list(model.named_parameters())
        groups = [
            {"params": [one for _, one in named if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for _, one in named if one.ndim <= 1], "weight_decay": 0.01, "lr": 5e-3},
        ]
        if num_groups == 1:
            groups = [{"params": [one for group in groups for one in group["params"]]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)  # gradients that are zero but for rounding stay small
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        """Steps on batches that follow from the step alone; the losses over all ranks."""
        losses = []
        shard = self.accelerator.engine.data_shard()
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=generator)
            batch = tokens.chunk(shard.count)[shard.index]
            with self.accelerator.accumulate(self.model):
                loss = token_loss(self.model(batch), shift(batch))
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
            self.step += 1
        return losses

    def values(self) -> list[torch.Tensor]:
        """Copies of what this rank holds of weights and optimizer states."""
        held = list(self.model.parameters())
        for state in getattr(self.optimizer, "state", {}).values():
            held += [value for value in state.values() if isinstance(value, torch.Tensor)]
        held += [getattr(one, "ds_tensor", one) for one in self.model.parameters()]
        return [to_local(one).detach().clone() for one in held]


@contextmanager
def run_of(engine: str, num_groups: int, seed: int = 0, **further: Any) -> Iterator[Run]:
    """A run whose traces are gone afterwards; the arguments are those of `Run`."""
    warnings.simplefilter("ignore")
    run = Run(engine, num_groups, seed, **further)
    yield run
    run.accelerator.free_memory()
    reset_state()


def state_folder(folder: Path, engine: str, num_groups: int) -> Path:
    """Where an engine's state is saved."""
    return folder / f"{engine}-{num_groups}"


def save(folder: Path, engine: str, num_groups: int) -> None:
    """Train, save, and note the losses of the run that goes on; on every rank."""
    with run_of(engine, num_groups) as run:
        run.train(STEPS_BEFORE_SAVING)
        target = state_folder(folder, engine, num_groups)
        run.accelerator.save_state(target)
        losses = run.train(STEPS_COMPARED)
        if run.accelerator.is_main_process:
            target.with_suffix(".json").write_text(json.dumps(losses))


def outcome(folder: Path, saver: str, loader: str, num_groups: int) -> tuple[str, str]:
    """The mark of a cell (see the module) and what is to be said about it; on every rank."""
    source = state_folder(folder, saver, num_groups)
    with run_of(loader, num_groups, seed=1) as run:
        before = run.values()
        try:
            run.accelerator.load_state(source)
        except Exception as error:
            after = run.values()
            same = len(before) == len(after) and all(map(torch.equal, before, after))
            return "x" if same else "X", f"{type(error).__name__}: {error}"
        run.step = STEPS_BEFORE_SAVING
        actual, expected = run.train(STEPS_COMPARED), json.loads(source.with_suffix(".json").read_text())
    differs = [abs(one - other) / other for one, other in zip(actual, expected, strict=True)]
    if max(differs) <= TOLERANCE:
        return "=", ""
    return "!", f"losses differ by {', '.join(f'{one:.1e}' for one in differs)}"


def cells(wanted: Sequence[str] = ()) -> list[tuple[str, str, int]]:
    """Pairs of engines, with a number of parameter groups that both can have."""
    pairs = [(saver, loader) for saver in ENGINES for loader in ENGINES]
    return [
        (saver, loader, next(n for n in ENGINES[saver].num_groups if n in ENGINES[loader].num_groups))
        for saver, loader in pairs
        if not wanted or any(name in (saver, loader, f"{saver}>{loader}") for name in wanted)
    ]


# ---- on every rank --------------------------------------------------------------------------------------------------


def save_each(folder: str, savers: list[tuple[str, int]]) -> None:
    """Save with engines of one number of ranks."""
    for engine, num_groups in savers:
        save(Path(folder), engine, num_groups)


def load_each(folder: str, tried: list[tuple[str, str, int]], rank: int) -> None:
    """Load with engines of one number of ranks, and write down what comes out."""
    for saver, loader, num_groups in tried:
        mark, text = outcome(Path(folder), saver, loader, num_groups)
        (Path(folder) / f"{saver}>{loader}.{rank}").write_text(f"{mark}\n{text}")


save_each.body = save_each  # type: ignore[attr-defined]  # what the processes of `tests.support.ranks` call
load_each.body = load_each  # type: ignore[attr-defined]


# ---- all of it ------------------------------------------------------------------------------------------------------


def try_cells(folder: Path, tried: Sequence[tuple[str, str, int]], timeout: float = 600) -> dict[str, list[str]]:
    """Try cells, each on its numbers of ranks.

    Args:
        folder: Where states are saved.
        tried: The cells.
        timeout: Seconds for all that is done on one number of ranks.

    Returns:
        By the name of a cell, what each rank says: the mark, and behind it what is to be said about it.
    """
    savers = sorted({(saver, number) for saver, _, number in tried})
    for world in sorted({ENGINES[saver].world for saver, _ in savers}):
        here = [saver for saver in savers if ENGINES[saver[0]].world == world]
        POOL.run(save_each, world, {"folder": str(folder), "savers": here}, timeout)
        _forget_ids([engine for engine, _ in here])
    for world in sorted({ENGINES[loader].world for _, loader, _ in tried}):
        cells_here = [cell for cell in tried if ENGINES[cell[1]].world == world]
        POOL.run(load_each, world, {"folder": str(folder), "tried": cells_here}, timeout)
        _forget_ids([loader for _, loader, _ in cells_here])
    return {
        f"{saver}>{loader}": [path.read_text() for path in sorted(folder.glob(f"{saver}>{loader}.*"))]
        for saver, loader, _ in tried
    }


def _forget_ids(engines: Sequence[str]) -> None:
    """Start new processes after ZeRO-3 ran in one only: it numbers parameters since the start of each process."""
    if "zero3@1" in engines:
        POOL.close(politely=True)


def mark_of(texts: Sequence[str]) -> str:
    """The mark of a cell, the worst one of its ranks."""
    marks = {text[0] for text in texts}
    return next((mark for mark in "X!x=" if mark in marks), "?")


def main(arguments: Sequence[str]) -> None:
    """Print the matrix."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_SHM_COMM": "0"}
    tried = cells([name for name in arguments if name != "-v"])
    with tempfile.TemporaryDirectory() as name:
        actual = try_cells(Path(name), tried, timeout=1800)
    POOL.close(politely=True)
    rows = [one for one in ENGINES if any(saver == one for saver, _, _ in tried)]
    columns = [one for one in ENGINES if any(loader == one for _, loader, _ in tried)]
    width = max(map(len, rows))
    for index, column in enumerate(columns):
        sys.stdout.write(" " * width + "  " + "| " * index + column + "\n")
    for row in rows:
        marks = [mark_of(actual[f"{row}>{column}"]) if f"{row}>{column}" in actual else " " for column in columns]
        sys.stdout.write(f"{row:{width}}  {' '.join(marks)}\n")
    marks_of_all = [mark_of(texts) for texts in actual.values()]
    sys.stdout.write(f"{marks_of_all.count('=')} of {len(marks_of_all)} cells go on as if nothing had changed\n")
    if "-v" in arguments:
        for cell, texts in actual.items():
            if mark_of(texts) != "=":
                sys.stdout.write(f"{cell}: {' | '.join(dict.fromkeys(texts))}\n")


if __name__ == "__main__":
    from tests.support import changed_engines  # what the processes import

    changed_engines.main(sys.argv[1:])
