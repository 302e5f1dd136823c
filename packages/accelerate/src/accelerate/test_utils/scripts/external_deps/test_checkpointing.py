"""A run that is stopped after an epoch and resumed goes on where it was.

First `accelerate launch .../external_deps/test_checkpointing.py --output_dir runs --partial_train_epoch 1`, then the same
with `--resume_from_checkpoint runs/epoch_0`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any

import torch

from accelerate import Accelerator, PartialState
from accelerate.test_utils.scripts.checks.sentences import accuracy, make_loaders, make_reader, train_epoch
from accelerate.utils import set_seed

SEED, BATCH, RATE = 42, 16, 0.02


def training_function(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Train; write a checkpoint `epoch_<n>` and what was reached, `state_<n>.json`, after every epoch.

    Args:
        config: `lr`, `num_epochs`, `seed` and `batch_size`.
        args: The arguments of the program.

    Raises:
        AssertionError: A resumed run does not find what the first one wrote down.
    """
    accelerator = Accelerator()
    set_seed(config["seed"])
    model = make_reader(args.model_name_or_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    training, checking = make_loaders(config["batch_size"])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(training) * config["num_epochs"])
    model, optimizer, training, checking, scheduler = accelerator.prepare(
        model, optimizer, training, checking, scheduler
    )

    def reached(epoch: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "accuracy": accuracy(accelerator, model, checking),
            "lr": scheduler.get_last_lr()[0],
            "optimizer_lr": optimizer.param_groups[0]["lr"],
        }

    first = 0
    if args.resume_from_checkpoint is not None:
        accelerator.load_state(args.resume_from_checkpoint)
        last = epoch_of(args.resume_from_checkpoint)
        compare(reached(last), state_file(os.path.dirname(os.path.abspath(args.resume_from_checkpoint)), last))
        first = last + 1
    stop = config["num_epochs"] if args.partial_train_epoch is None else args.partial_train_epoch
    for epoch in range(first, stop):
        train_epoch(accelerator, model, optimizer, scheduler, training)
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
        metrics = reached(epoch)
        accelerator.print(metrics)
        if accelerator.is_main_process:
            with open(state_file(args.output_dir, epoch), "w") as file:
                json.dump(metrics, file)


def epoch_of(folder: str) -> int:
    """The number of the epoch after which a checkpoint was made.

    Raises:
        ValueError: The folder's name does not say it.
    """
    match = re.search(r"epoch_(\d+)$", os.path.abspath(folder))
    if match is None:
        raise ValueError(f"--resume_from_checkpoint is {folder!r}: give a folder called epoch_<number>.")
    return int(match[1])


def state_file(folder: str, epoch: int) -> str:
    """Where what was reached after an epoch is written down."""
    return os.path.join(folder, f"state_{epoch}.json")


def compare(found: dict[str, Any], path: str) -> None:
    """Compare what a resumed run finds with what the first one wrote down."""
    with open(path) as file:
        expected = json.load(file)
    for name, value in expected.items():
        near = abs(found[name] - value) < 1e-6
        assert near, f"{name} after epoch {expected['epoch']} was {value!r}, and is {found[name]!r} after loading"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the arguments of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", help="Folder of a model of transformers to train instead of our own.")
    parser.add_argument("--output_dir", default=".", help="Where checkpoints go.")
    parser.add_argument("--resume_from_checkpoint", help="The checkpoint to go on from.")
    parser.add_argument("--partial_train_epoch", type=int, help="Stop after so many epochs, as if interrupted.")
    parser.add_argument("--num_epochs", type=int, default=2, help="Number of epochs of the full run.")
    return parser.parse_args(words)


def main() -> int:
    """Run the program; 0 when everything went on where it was."""
    args = parse()
    training_function({"lr": RATE, "num_epochs": args.num_epochs, "seed": SEED, "batch_size": BATCH}, args)
    PartialState().destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
