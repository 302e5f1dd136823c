"""A Trainer of the transformers library with everything in it, and what came out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.clients import tiny

TRAINER_OPTIONS = (
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "callbacks",
    "compute_metrics",
    "processing_class",
)


def make_trainer(folder: Path, count: int = 32, dropout: float = 0.0, **options: Any) -> Any:
    """A Trainer of a tiny model.

    Args:
        folder: Where checkpoints go.
        count: Sequences to learn from.
        dropout: Share of attention that is set to zero.
        options: `model` (a function that makes one), arguments of Trainer, or fields of TrainingArguments.
    """
    import transformers

    make_model = options.pop("model", lambda: tiny.llama(attention_dropout=dropout))
    given = {name: options.pop(name) for name in TRAINER_OPTIONS if name in options}
    settings = {
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "save_strategy": "steps" if "save_steps" in options else "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **options,
    }
    return transformers.Trainer(
        model=make_model(),
        args=transformers.TrainingArguments(str(folder), **settings),
        **{"train_dataset": tiny.Sequences(count), "data_collator": tiny.pad, **given},
    )


def history(trainer: Any, name: str) -> list[float]:
    """What was logged under `name`, step by step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The model's state dict, without wrappers."""
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False).state_dict()
