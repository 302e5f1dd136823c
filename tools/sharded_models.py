"""Models of transformers that arrive sharded, trained and resumed, against one process: `python -m tools.sharded_models`.

Prints the table of docs/parallelism.md. A cell is the largest relative difference of a loss or a gradient norm in float32; one
above the limit ends the run with status 1. `tests/clients/test_sharded_at_load.py` runs some of its rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig

MOST = 1e-6
STEPS, SAVED_AT, BATCH = 5, 2, 4
ROWS = torch.randint(3, 64, (STEPS * BATCH, 12), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "use_cache": False,
}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "tp 2": ({"tp_size": 2}, {"tp_size": 2}),
    "tp 4": ({"tp_size": 4}, {"tp_size": 4}),
    "fsdp 2": ({"fsdp_size": 2}, {"dp_shard_size": 2}),
    "fsdp 4": ({"fsdp_size": 4}, {"dp_shard_size": 4}),
    "tp 2 x fsdp 2": ({"tp_size": 2, "fsdp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}),
    "dp 2 x fsdp 2": ({"dp_replicate_size": 2, "fsdp_size": 2}, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "ep 2": ({"ep_size": 2, "tp_size": 2}, {"tp_size": 2}),
    "ep 2 x fsdp 2": ({"ep_size": 2, "tp_size": 2, "fsdp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}),
    "ep 4 over fsdp 4": ({"ep_size": 4, "fsdp_size": 4}, {"dp_shard_size": 4}),
}
"""By name: the sizes for `DistributedConfig`, and those for `ParallelismConfig`."""
COLUMNS = ("loop", "resumed", "resumed from", "Trainer", "SFTTrainer")


def write_models(folder: Path) -> None:
    """Write a dense model and a mixture of experts, without heads that a group of four could not share."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder / "dense")
    # Each rank computes the loss that balances experts from its own tokens, so several readers have another one than one process.
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, router_aux_loss_coef=0.0)
    transformers.MixtralForCausalLM(config).save_pretrained(folder / "experts")


def load(folder: Path, layout: str | None) -> Any:
    """The model of a layout, sharded while it is loaded; None loads a full one."""
    arrives = {} if layout is None else {"distributed_config": DistributedConfig(**LAYOUTS[layout][0])}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arrives)


class Loop:
    """A hand-written training loop and its accelerator."""

    def __init__(self, folder: Path, layout: str | None) -> None:
        sizes = {} if layout is None else LAYOUTS[layout][1]
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes) if sizes else None)
        model = load(folder, layout)
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=BATCH // readers_of(layout))  # type: ignore[arg-type]
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def run(self, start: int = 0, save_to: Path | None = None) -> list[float]:
        """Losses and norms of the steps from `start`; the state before the step `SAVED_AT` is saved."""
        figures = []
        for step, rows in enumerate(self.accelerator.skip_first_batches(self.loader, start), start):
            if save_to is not None and step == SAVED_AT:
                self.accelerator.save_state(save_to)
            loss = self.model(input_ids=rows, labels=rows).loss
            self.accelerator.backward(loss)
            norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean: Any = self.accelerator.reduce(loss.detach(), "mean")
            figures += [float(mean), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)]
        return figures

    def resume(self, folder: Path) -> list[float]:
        """Losses and norms of the steps after a checkpoint."""
        self.accelerator.load_state(folder)
        return self.run(SAVED_AT)


def trained_by(name: str, folder: Path, layout: str | None) -> list[float]:
    """Losses and norms that a trainer logs, and its loss in evaluation."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // readers_of(layout),
        "learning_rate": 0.5,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "per_device_eval_batch_size": BATCH,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    AcceleratorState._reset_state()
    trainer = {"Trainer": _trainer, "SFTTrainer": _sft_trainer}[name](load(folder, layout), options)
    trainer.train()
    logged = [
        entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in entry
    ]
    return [float(figure) for figure in logged]


class _InOrder:
    """Reads the samples in their order."""

    train_dataset: Any

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def _trainer(model: Any, options: dict[str, Any]) -> Any:
    samples: Any = [{"input_ids": row, "labels": row.clone()} for row in ROWS]
    kind = type("Trainer", (_InOrder, transformers.Trainer), {})
    return kind(model, transformers.TrainingArguments(**options), train_dataset=samples, eval_dataset=samples)


def _sft_trainer(model: Any, options: dict[str, Any]) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(token): token for token in range(64)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="1", eos_token="2", unk_token="0"
    )
    samples = Dataset.from_list([{"input_ids": row.tolist()} for row in ROWS])
    arguments = SFTConfig(**options, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True})
    kind = type("SFTTrainer", (_InOrder, SFTTrainer), {})
    return kind(model, arguments, train_dataset=samples, eval_dataset=samples, processing_class=tokenizer)


def readers_of(layout: str | None) -> int:
    """How many ranks read different samples."""
    return 1 if layout is None else ranks_of(layout) // LAYOUTS[layout][1].get("tp_size", 1)


def ranks_of(layout: str) -> int:
    """How many ranks a layout has."""
    sizes = LAYOUTS[layout][1].values()
    return int(torch.tensor(list(sizes)).prod())


def figures_of(folder: Path, layout: str | None, other: str | None) -> dict[str, list[float]]:
    """The figures of each column: of one layout, which also resumes the checkpoint of another one; or of one process."""
    loop = Loop(folder, layout)
    checkpoint = folder / f"state of {layout}"
    columns = {"loop": loop.run(save_to=checkpoint), "resumed": loop.resume(checkpoint)}
    columns["resumed from"] = loop.resume(folder / f"state of {other}")
    del loop
    return columns | {name: trained_by(name, folder, layout) for name in ("Trainer", "SFTTrainer")}


def launch(model: Path, layout: str | None, other: str | None) -> dict[str, list[float]]:
    """Compute the figures of a layout in as many processes as it has ranks."""
    num_processes = 1 if layout is None else ranks_of(layout)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(num_processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    script = [__file__, "--rank-of", json.dumps([str(model), layout, other])]
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not lines:
        raise RuntimeError(done.stdout + done.stderr)
    columns: dict[str, list[float]] = json.loads(lines[0][4:])
    return columns


def difference(figures: Iterable[float], expected: Iterable[float]) -> float:
    """The largest relative difference."""
    return max(abs(one / wanted - 1) for one, wanted in zip(figures, expected, strict=True))


def main() -> int:
    """Print the table; returns 1 if a cell is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layout", action="append", choices=list(LAYOUTS), help="One layout only; may be given again."
    )
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.rank_of:
        folder, layout, other = json.loads(options.rank_of)
        columns = figures_of(Path(folder), layout, other)
        print("ROW " + json.dumps(columns) if int(os.environ.get("RANK", "0")) == 0 else "", flush=True)
        return 0
    worst = 0.0
    print("| layout | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        expected = {name: launch(Path(folder) / name, None, None) for name in ("dense", "experts")}
        last: dict[str, str | None] = {"dense": None, "experts": None}
        for layout in options.layout or LAYOUTS:
            name = "experts" if layout.startswith("ep") else "dense"
            columns = launch(Path(folder) / name, layout, last[name])
            cells = {column: difference(columns[column], expected[name][column]) for column in COLUMNS}
            worst = max(worst, *cells.values())
            source = last[name] or "one process"
            shown = [
                f"{cells[column]:.0e}" + (f" ({source})" if column == "resumed from" else "") for column in COLUMNS
            ]
            print(f"| {layout} | {' | '.join(shown)} |", flush=True)
            last[name] = layout
    print(f"\nThe largest relative difference: {worst:.1e}.")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
