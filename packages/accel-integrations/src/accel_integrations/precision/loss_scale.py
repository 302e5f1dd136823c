"""float16 with loss scaling, so that small gradients do not underflow."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from accel_integrations.precision.autocast import autocast, wrap_forward
from accel_integrations.precision.precision import Precision
from accel_state.settings.handlers import AutocastKwargs, Handlers


def scaled_step(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
) -> bool:
    """Take a step through a scaler; its scale is not updated.

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

    noticed.__wrapped__ = step  # type: ignore[attr-defined] # the scaler looks for an argument in its signature
    optimizer.step = noticed  # type: ignore[method-assign]
    try:
        scaler.step(optimizer, closure) if closure is not None else scaler.step(optimizer)
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
    return taken


@final
class Float16Precision(Precision):
    """float16 where it is safe, by `torch.autocast`, with `torch.amp.GradScaler`.

    The loss scale is updated once all optimizers have stepped, because inf values in the gradients of one must not
    change the scale by which those of the others are divided. When only some step, it is updated before the next
    backward pass.

    Args:
        device_type: The type of device to compute on.
        handlers: May hold how autocast and the scaler behave.
        scaler_class: `torch.amp.GradScaler`, or `ShardedGradScaler` for sharded gradients.
    """

    name = "fp16"
    scaler: torch.amp.GradScaler

    def __init__(
        self, device_type: str, handlers: Handlers, scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler
    ) -> None:
        self._device_type = device_type
        self._handlers = handlers
        options = handlers.grad_scaler.to_kwargs() if handlers.grad_scaler is not None else {}
        self.scaler = scaler_class(device_type, **options)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._must_update = False

    def wrap_forward(self, model: nn.Module) -> nn.Module:
        """Let `model.forward` run under autocast."""
        return wrap_forward(model, self._device_type, torch.float16, self._handlers.autocast)

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context under autocast."""
        return autocast(self._device_type, torch.float16, handler or self._handlers.autocast)

    # ---- stepping -----------------------------------------------------------------------------------------------

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the loss scale only after this optimizer, too, has stepped."""
        self._optimizers.add(optimizer)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the current scale."""
        if self._must_update:
            self._update()
        return self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale; asked twice within a step, it does so once.

        Raises:
            RuntimeError: No loss was ever scaled.
        """
        self._check_scaled()
        if self._stage_of(optimizer) is OptState.READY:  # torch raises the second time
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Take a step unless gradients are not finite.

        Raises:
            RuntimeError: No loss was ever scaled.
        """
        self._check_scaled()
        if self._stage_of(optimizer) is OptState.STEPPED:
            self._update()
        taken = scaled_step(self.scaler, optimizer, closure)
        self._must_update = True
        if all(self._stage_of(each) is OptState.STEPPED for each in self._optimizers):
            self._update()
        return taken

    def _check_scaled(self) -> None:
        if self.scaler.is_enabled() and self.scaler._scale is None:  # the first loss sets it
            raise RuntimeError(
                "mixed_precision='fp16': gradients are divided by the loss scale, but no loss was multiplied by it. Call "
                "accelerator.backward(loss) instead of loss.backward()."
            )

    def _stage_of(self, optimizer: torch.optim.Optimizer) -> OptState | None:
        """The optimizer's stage since the last update of the scaler; None when the scaler is disabled."""
        if not self.scaler.is_enabled():
            return None
        stage: OptState = self.scaler._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _update(self) -> None:
        self._must_update = False
        self.scaler.update()

    # ---- storing ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """The scale and its history."""
        if self._must_update:
            self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and its history."""
        self.scaler.load_state_dict(state)
