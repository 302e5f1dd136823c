"""8-bit floats with Transformer Engine: its layers in float8, everything else in bfloat16."""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.precision.autocast import AutocastForward, AutocastPrecision
from accel_integrations.precision.transformer_engine_layers import (
    apply_fp8_autowrap,
    convert_model,
    has_transformer_engine_layers,
)
from accel_state.settings.fp8 import TERecipeKwargs
from accel_state.settings.handlers import Handlers


@final
class TransformerEnginePrecision(AutocastPrecision):
    """Linear layers and layer norms of Transformer Engine, in float8 while the model trains; outputs are float32.

    A model that has layers of Transformer Engine already keeps them and gets no others.

    Args:
        device_type: The type of device to compute on.
        handlers: May hold how 8-bit floats are scaled, and how autocast behaves.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
    """

    name = "fp8"

    def __init__(self, device_type: str, handlers: Handlers) -> None:
        super().__init__(device_type, handlers)
        self._recipe = handlers.fp8 if isinstance(handlers.fp8, TERecipeKwargs) else TERecipeKwargs()

    @override
    def convert(self, model: nn.Module) -> nn.Module:
        """Replace layers of torch by those of Transformer Engine."""
        if not has_transformer_engine_layers(model):
            with torch.no_grad():
                convert_model(model)
        return model

    @override
    def wrap_forward(self, model: nn.Module) -> nn.Module:
        """Let `model.forward` run in 8 bits, and what cannot under autocast."""
        if isinstance(model.forward, AutocastForward):  # of an earlier preparation
            return model
        plain = model.forward
        apply_fp8_autowrap(model, self._recipe)
        super().wrap_forward(model)
        model.__dict__["_original_forward"] = plain
        return model
