"""A precision: float64 in every forward, and float32 outside."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn

from accel_integrations.precision.precision import Precision


@final
class DoublePrecision(Precision):
    """Computes in float64."""

    name = "double"

    def __init__(self, device_type: str, handlers: Any) -> None:
        self.device_type = device_type

    def convert(self, model: nn.Module) -> nn.Module:
        return model.double()

    def wrap_forward(self, model: nn.Module) -> nn.Module:
        forward = model.forward
        model.forward = lambda inputs: forward(inputs.double()).float()  # type: ignore[method-assign]
        return model

    def state_dict(self) -> dict[str, Any]:
        return {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "seen": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state
