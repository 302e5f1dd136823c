"""Checks that training reaches an accuracy, with any engine and number of processes.

For example `accelerate launch --num_processes 2 .../external_deps/test_performance.py --performance_lower_bound 0.9`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch

from accelerate import Accelerator, PartialState
from accelerate.test_utils.scripts.checks.sentences import accuracy, make_loaders, make_reader, train_epoch
from accelerate.utils import ParallelismConfig, set_seed

SEED, BATCH, RATE = 42, 16, 0.02


def training_function(config: dict[str, Any], args: argparse.Namespace) -> float:
    """Train, and write the accuracies to `all_results.json`.

    Args:
        config: `lr`, `num_epochs`, `seed` and `batch_size`.
        args: The arguments of the program.

    Returns:
        The best accuracy of all epochs.

    Raises:
        AssertionError: It is below `args.performance_lower_bound`.
    """
    parallelism = ParallelismConfig(tp_size=args.tp_size) if args.tp_size else None
    accelerator = Accelerator(parallelism_config=parallelism)
    set_seed(config["seed"])
    settings = {"dtype": args.model_dtype, "tp_plan": args.tp_plan}
    model = make_reader(args.model_name_or_path, **{name: value for name, value in settings.items() if value})
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    training, checking = make_loaders(config["batch_size"])
    steps = len(training) * config["num_epochs"]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    model, optimizer, training, checking, scheduler = accelerator.prepare(
        model, optimizer, training, checking, scheduler
    )
    reached = []
    for epoch in range(config["num_epochs"]):
        train_epoch(accelerator, model, optimizer, scheduler, training)
        reached.append(accuracy(accelerator, model, checking))
        accelerator.print(f"epoch {epoch}: accuracy {reached[-1]:.3f}")
    best = max(reached)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
        with open(os.path.join(args.output_dir, "all_results.json"), "w") as file:
            json.dump({"accuracy": best, "accuracies": reached}, file)
    bound = args.performance_lower_bound
    assert bound is None or best >= bound, f"the best accuracy is {best:.3f}, but must be at least {bound}"
    return best


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the arguments of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", help="Folder of a model of transformers to train instead of our own.")
    parser.add_argument("--output_dir", default=".", help="Where all_results.json goes.")
    parser.add_argument("--performance_lower_bound", type=float, help="The accuracy to reach.")
    parser.add_argument("--num_epochs", type=int, default=3, help="Number of epochs.")
    parser.add_argument("--add_pad_token", action="store_true", help="No effect: all sentences are of one length.")
    parser.add_argument("--tp_plan", help="Tensor parallel plan of transformers, such as auto.")
    parser.add_argument("--tp_size", type=int, help="Size of the tensor parallel group.")
    parser.add_argument("--model_dtype", help="Dtype of the model of transformers.")
    return parser.parse_args(words)


def main() -> int:
    """Run the program; 0 when the accuracy was reached."""
    args = parse()
    training_function({"lr": RATE, "num_epochs": args.num_epochs, "seed": SEED, "batch_size": BATCH}, args)
    PartialState().destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
