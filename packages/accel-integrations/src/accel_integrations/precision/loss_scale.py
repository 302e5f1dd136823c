"""float16 with a scaled loss, so that small gradients do not vanish."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn

from accel_integrations.precision.autocast import autocast, wrap_forward
from accel_integrations.precision.precision import Precision
from accel_state.settings.handlers import AutocastKwargs, Handlers


def scaled_step(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
) -> bool:
    """Take a step through a scaler, and let the scale adapt.

    Returns:
        False when the optimizer was not called, because gradients were not finite.
    """
    taken = False
    step = optimizer.step
    own = vars(optimizer).get("step")  # schedulers put a counting one on the instance

    def noticed(*args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        taken = True
        return step(*args, **kwargs)

    optimizer.step = noticed  # type: ignore[method-assign]
    try:
        scaler.step(optimizer, closure) if closure is not None else scaler.step(optimizer)
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
    scaler.update()
    return taken


@final
class Float16Precision(Precision):
    """float16 where it is safe, by `torch.autocast`, with `torch.amp.GradScaler`.

    Args:
        device_type: The type of device to compute on.
        handlers: May hold how autocast and the scaler behave.
    """

    name = "fp16"

    def __init__(self, device_type: str, handlers: Handlers) -> None:
        self._device_type = device_type
        self._handler = handlers.autocast
        options = handlers.grad_scaler.to_kwargs() if handlers.grad_scaler is not None else {}
        self.scaler = torch.amp.GradScaler(device_type, **options)

    def wrap_forward(self, model: nn.Module) -> nn.Module:
        """Let `model.forward` run under autocast."""
        return wrap_forward(model, self._device_type, torch.float16, self._handler)

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context under autocast."""
        return autocast(self._device_type, torch.float16, handler or self._handler)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the current scale."""
        assert self.scaler is not None
        return self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale; asked twice within a step, it does so once."""
        assert self.scaler is not None
        state = self.scaler._per_optimizer_states[id(optimizer)]
        if state["stage"].value == 0:  # READY: torch refuses the second time
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Take a step unless gradients are not finite."""
        assert self.scaler is not None
        return scaled_step(self.scaler, optimizer, closure)

    def state_dict(self) -> dict[str, Any] | None:
        """The scale and its history."""
        assert self.scaler is not None
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that scale."""
        assert self.scaler is not None
        self.scaler.load_state_dict(state)
