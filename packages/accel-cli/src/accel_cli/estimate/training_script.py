"""The training script that `accelerate estimate-memory --parallel` rehearses: a model, an optimizer, and a few steps.

Its arguments are those of `accelerate estimate-memory`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from accel_cli.estimate.batches import BATCHES, BatchSize
from accel_cli.estimate.building import build
from accel_cli.estimate.command import estimate_command_parser, find_source
from accel_cli.estimate.optimizers import make_optimizer
from accel_cli.estimate.training import enable_checkpointing


def main(words: list[str]) -> None:
    """Train on one batch, until the rehearsal ends."""
    args = estimate_command_parser().parse_args(words)
    source = find_source(args)
    accelerator: Any = import_module("accelerate").Accelerator()
    model: Any = build(source, args.trust_remote_code).train()
    batch = BATCHES[source.library or ""](model, BatchSize(args.batch_size, args.sequence_length))
    if args.gradient_checkpointing:
        enable_checkpointing(model)
    optimizer = make_optimizer(args.optimizer, [p for p in model.parameters() if p.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)
    while True:
        outputs = model(*batch.args, **batch.kwargs)
        accelerator.backward(batch.loss(outputs))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1:])
