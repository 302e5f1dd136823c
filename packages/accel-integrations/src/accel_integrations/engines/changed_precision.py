"""What a program changes about mixed precision after the start: the scaler of losses, and whether to autocast."""

from __future__ import annotations

import torch

from accel_integrations.engines.engine import Engine
from accel_integrations.precision.loss_scale import GivenScaler, LossScale
from accel_integrations.precision.precision import Precision


def scale_by(engine: Engine, scaler: torch.amp.GradScaler | None) -> None:
    """Scale losses by another scaler from now on.

    Args:
        engine: The engine that trains.
        scaler: The scaler; None scales none.
    """
    if isinstance(engine.precision, LossScale):
        engine.precision.scaler = scaler or torch.amp.GradScaler(enabled=False)
    elif scaler is not None:
        _change(engine, GivenScaler(engine.precision, scaler))


def autocast(engine: Engine, wanted: bool) -> None:
    """Change whether models that are prepared from now on, and `Accelerator.autocast` blocks, run under `torch.autocast`.

    Without `mixed_precision`, they do so in the dtype that torch takes by default on the device. Losses are scaled as
    before.

    Args:
        engine: The engine that trains.
        wanted: Whether they do.
    """
    state, scaler = engine.context.state, engine.precision.scaler
    name = state.mixed_precision if wanted else "no"
    if wanted and name == "no":
        name = "fp16" if torch.get_autocast_dtype(state.device.type) is torch.float16 else "bf16"
    precision = engine.make_precision(name)
    if scaler is not None:
        precision = precision if isinstance(precision, LossScale) else GivenScaler(precision, scaler)
        precision.scaler = scaler
    _change(engine, precision)


def _change(engine: Engine, precision: Precision) -> None:
    engine.precision = precision
    for prepared in engine.context.prepared.optimizers:
        precision.watch(prepared.optimizer)
