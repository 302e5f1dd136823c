"""The interface of a precision."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_state.settings.handlers import AutocastKwargs


class Precision(ABC):
    """One precision. The default method bodies are full precision: nothing is converted, scaled or skipped.

    A concrete precision overrides only what it changes, is final, and is chosen by `Engine.make_precision`.
    """

    name: ClassVar[str]
    """The value of `mixed_precision` it serves: "no", "bf16", "fp16" or "fp8"."""

    scales: ClassVar[bool] = False
    """Whether it overrides `scale`, `unscale` or `step`; else steps spare themselves these calls."""

    scaler: torch.amp.GradScaler | None = None
    """The loss scaler, where the precision needs one. Read by others as `accelerator.scaler`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.scales = any(getattr(cls, name) is not getattr(Precision, name) for name in ("scale", "unscale", "step"))

    def convert(self, model: nn.Module) -> nn.Module:
        """Replace layers by ones of this precision, before anything is sharded. Returns the model to use."""
        return model

    def wrap_forward(self, model: nn.Module) -> nn.Module:
        """Make `model.forward` compute in this precision and return float32 outputs. Changes and returns `model`."""
        return model

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context in which operations run in this precision; `handler` overrides the configured one."""
        return nullcontext()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a plain torch optimizer whose steps this object will take."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of a plain torch optimizer; once per step."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Take the optimizer's step.

        Returns:
            False when the step was skipped because gradients were not finite.
        """
        optimizer.step(closure) if closure is not None else optimizer.step()
        return True

    def forget(self) -> None:
        """Begin anew, for other models and optimizers."""

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint must keep of this object, None when nothing."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
