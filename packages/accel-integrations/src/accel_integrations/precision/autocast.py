"""Full precision, and forward passes under `torch.autocast`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, ClassVar, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.precision.precision import Precision
from accel_ops.dtypes import convert_to_fp32
from accel_state.settings.handlers import AutocastKwargs, Handlers


@final
class AutocastForward:
    """A forward that runs under autocast and returns float32; replaces `model.forward`.

    An object rather than a closure, so that the model can still be copied and pickled.

    Args:
        forward: The forward to call.
        device_type: As for `torch.autocast`.
        dtype: As for `torch.autocast`.
        options: Further arguments of `torch.autocast`.
    """

    def __init__(
        self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        self.__wrapped__ = forward  # signatures are read through it
        self.__name__ = "forward"
        self.device_type = device_type
        self.dtype = dtype
        self.options = options

    def bound_to(self, model: nn.Module) -> AutocastForward:
        """The same for another model of the same class, as the one that `compile_regions` makes."""
        forward = self.__wrapped__
        if isinstance(forward, MethodType):
            forward = MethodType(forward.__func__, model)
        return AutocastForward(forward, self.device_type, self.dtype, self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        with torch.autocast(self.device_type, self.dtype, **self.options):
            outputs = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(outputs)


def autocast(device_type: str, dtype: torch.dtype, handler: AutocastKwargs | None) -> AbstractContextManager[None]:
    """The context that `Accelerator.autocast` gives."""
    options = handler.to_kwargs() if handler is not None else {}
    return torch.autocast(device_type, dtype, **options)


def wrap_forward(model: nn.Module, device_type: str, dtype: torch.dtype, handler: AutocastKwargs | None) -> nn.Module:
    """Replace the model's forward by an `AutocastForward`; `_original_forward` keeps the old one."""
    options = handler.to_kwargs() if handler is not None else {}
    forward = model.forward
    if isinstance(forward, AutocastForward):  # of an earlier preparation, perhaps in another precision
        forward = forward.__wrapped__
    # past `__setattr__`, by which compiled modules would set one of them on the module inside
    model.__dict__.update(_original_forward=forward, forward=AutocastForward(forward, device_type, dtype, options))
    return model


@final
class FullPrecision(Precision):
    """Computes in the dtype that parameters have: nothing is converted.

    Args:
        device_type: Not used; all precisions are made of these two.
        handlers: Not used.
    """

    name = "no"

    def __init__(self, device_type: str = "cpu", handlers: Handlers | None = None) -> None:
        """Nothing to keep."""


class AutocastPrecision(Precision):
    """A lower precision where it is safe, by `torch.autocast`; parameters and outputs stay in float32.

    Args:
        device_type: The type of device to compute on.
        handlers: May hold how autocast behaves.

    Attributes:
        dtype: In which it computes.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def __init__(self, device_type: str, handlers: Handlers) -> None:
        self._device_type = device_type
        self._handlers = handlers

    @override
    def wrap_forward(self, model: nn.Module) -> nn.Module:
        """Let `model.forward` run under autocast."""
        return wrap_forward(model, self._device_type, self.dtype, self._handlers.autocast)

    @override
    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        return autocast(self._device_type, self.dtype, handler or self._handlers.autocast)


@final
class BFloat16Precision(AutocastPrecision):
    """bfloat16 by `torch.autocast`."""

    name = "bf16"
