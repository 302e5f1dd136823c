"""8-bit floats with torchao: linear layers in float8, everything else in bfloat16."""

from __future__ import annotations

from typing import final

from torch import nn
from typing_extensions import override

from accel_bigmodel.replaceable import look_up
from accel_integrations.precision.autocast import AutocastPrecision
from accel_integrations.precision.float8_layers import convert_model_to_fp8_ao, has_ao_layers
from accel_state.settings.fp8 import AORecipeKwargs
from accel_state.settings.handlers import Handlers
from accel_state.warning import warn_user


@final
class TorchAOPrecision(AutocastPrecision):
    """Matrix products of linear layers in float8, scaled tensor by tensor; parameters and outputs stay in float32.

    Args:
        device_type: The type of device to compute on.
        handlers: May hold which layers are converted and how tensors are scaled, and how autocast behaves.

    Raises:
        MissingLibraryError: When torchao is not installed.
    """

    name = "fp8"

    def __init__(self, device_type: str, handlers: Handlers) -> None:
        super().__init__(device_type, handlers)
        self._recipe = handlers.fp8 if isinstance(handlers.fp8, AORecipeKwargs) else AORecipeKwargs()

    @override
    def convert(self, model: nn.Module) -> nn.Module:
        """Replace linear layers by float8 ones."""
        if not has_ao_layers(model):
            convert = look_up("convert_model_to_fp8_ao", convert_model_to_fp8_ao)
            convert(model, config=self._recipe.config, module_filter_func=self._recipe.module_filter_func)
        if not has_ao_layers(model):
            warn_user(
                f"mixed_precision='fp8' converts no layer of {type(model).__name__}, which trains in bfloat16. By "
                "default it converts linear layers except the first and the last one, if their sizes are multiples of "
                "16. Set AORecipeKwargs(module_filter_func=...) to choose others."
            )
        return model
