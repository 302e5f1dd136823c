"""Checks of mixed precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate.test_utils.scripts.checks.check import (
    Process,
    SkippedError,
    checks,
    make_accelerator,
    need_data_parallelism,
)
from accelerate.test_utils.scripts.checks.training import make_data, make_model, make_optimizer, train
from accelerate.utils import is_bf16_available, is_fp16_available

EPOCHS = 8  # with fp16, the first steps are skipped until the loss scale fits
DTYPES = {"bf16": (torch.bfloat16, is_bf16_available), "fp16": (torch.float16, is_fp16_available)}


def training_in(process: Process, name: str) -> None:
    """Layers compute in the dtype, and the loss decreases."""
    need_data_parallelism(process)
    dtype, is_available = DTYPES[name]
    if not is_available():
        raise SkippedError("this device does not support it")
    accelerator = make_accelerator(mixed_precision=name)
    model = make_model()
    seen: set[torch.dtype] = set()
    model[0].register_forward_hook(lambda layer, inputs, output: seen.add(output.dtype))
    loader = DataLoader(make_data(8 * process.world), batch_size=2)
    prepared: Any = accelerator.prepare(model, make_optimizer(model), loader)
    losses = [loss for _ in range(EPOCHS) for loss in train(accelerator, prepared)]
    assert seen == {dtype}, f"the first layer computed in {seen} instead of {dtype}"
    per_epoch = len(losses) // EPOCHS
    before, after = sum(losses[:per_epoch]), sum(losses[-per_epoch:])
    assert after < before / 2, f"the loss was {before:.4f} in the first epoch and {after:.4f} in the last"


PRECISION = checks("mixed precision", bf16=partial(training_in, name="bf16"), fp16=partial(training_in, name="fp16"))
