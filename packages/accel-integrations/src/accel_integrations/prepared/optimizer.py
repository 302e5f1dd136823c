"""`AcceleratedOptimizer`: an optimizer that steps only at the end of an accumulation window."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from typing import Any

import torch

from accel_ops import collectives
from accel_state import supervision
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import missing_library
from accel_state.gradient_state import GradientState
from accel_state.libraries import is_lomo_available
from accel_state.processes import PartialState
from accel_state.public_names import known_as


def is_lomo_optimizer(optimizer: object) -> bool:
    """Whether an optimizer comes from `lomo_optim`, checked without importing it."""
    return any(base.__module__.partition(".")[0] == "lomo_optim" for base in type(optimizer).__mro__)


def lomo_backward(loss: torch.Tensor, learning_rate: float | None, optimizers: Iterable[Any]) -> None:
    """Backward and update in one go.

    Args:
        loss: 0-dim.
        learning_rate: The rate of this update.
        optimizers: The prepared plain optimizers, of which the LOMO ones are used.

    Raises:
        MissingLibraryError: When `lomo_optim` is not installed.
        ValueError: Without a learning rate, or without a LOMO optimizer.
    """
    candidates = list(optimizers)
    chosen = [optimizer for optimizer in candidates if is_lomo_optimizer(optimizer)]
    if not chosen:
        if not is_lomo_available():
            raise missing_library("lomo-optim", why="lomo_backward()")
        kinds = ", ".join(type(optimizer).__name__ for optimizer in candidates) or "none"
        raise ValueError(
            f"lomo_backward() needs a prepared Lomo or AdaLomo optimizer; those prepared are: {kinds}. Prepare one, or "
            "call backward()."
        )
    if learning_rate is None:
        raise ValueError(
            "lomo_backward() got learning_rate=None: LOMO updates parameters during the backward pass, so it needs the "
            "learning rate now. Pass it."
        )
    for optimizer in chosen:
        optimizer.fused_backward(loss, learning_rate)


TakeStep = Callable[[torch.optim.Optimizer, Callable[[], Any] | None], bool]


@known_as("accelerate.optimizer.AcceleratedOptimizer")
class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: `step` and `zero_grad` do nothing while gradients are still being accumulated.

    Args:
        optimizer (`torch.optim.Optimizer`): The optimizer.
        device_placement (`bool`): Move its state to the devices of its parameters.
        scaler (`torch.amp.GradScaler`, *optional*): Through which steps are taken under float16.

    Attributes:
        optimizer: The wrapped optimizer.
    """

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    accelerator_state: AcceleratorState
    gradient_state: GradientState
    device_placement: bool
    _is_overflow = False
    _before_step: Callable[[], None] | None = None
    _take_step: TakeStep | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        # no call of super: the parameters belong to the wrapped optimizer
        self.optimizer = optimizer
        self.scaler = scaler
        self.accelerator_state = AcceleratorState()
        self.gradient_state = GradientState()
        self.device_placement = device_placement
        if device_placement and getattr(optimizer, "state", None):  # a proxy may have none
            # torch moves states to their parameters, and leaves `step` in CPU memory, where every step reads it
            optimizer.load_state_dict(optimizer.state_dict())
        if is_lomo_optimizer(optimizer):
            self._take_step = _stepped_in_backward

    def step_through(self, take_step: TakeStep, before_step: Callable[[], None] | None = None) -> None:
        """Set the function that takes the steps: an engine's.

        Args:
            take_step: Called with the wrapped optimizer and the closure; returns False for a skipped step.
            before_step: Called before every step that is taken.
        """
        if self._take_step is not _stepped_in_backward:
            self._take_step = take_step
            self._before_step = before_step

    # ---- what the wrapped optimizer holds -----------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's groups of parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> Any:
        """The wrapped optimizer's default settings."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state."""
        return self.optimizer.state_dict()

    # ---- stepping -----------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, on sync steps only."""
        if self.gradient_state.sync_gradients:
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, on sync steps only.

        Args:
            closure (*optional*): Computes the loss and its gradients anew. Optimizers that need one, such as LBFGS, get the
                mean of the losses of all processes, so that each takes the same step.

        Returns:
            What the closure returned when it was first called; None without a closure, or where no step is due.
        """
        if not self.gradient_state.sync_gradients:
            return None
        losses: list[Any] = []
        if closure is not None:
            averages = PartialState().num_processes > 1 and needs_closure(self.optimizer)
            closure = _noting(closure, losses, averages)
        if supervision.counter is not None:  # `report_progress`, without a call in every step
            supervision.counter[0] += 1
        if self._before_step is not None:
            self._before_step()
        if self._take_step is not None:
            self._is_overflow = not self._take_step(self.optimizer, closure)
        elif self.scaler is not None:
            from accel_integrations.precision.loss_scale import scaled_step

            self._is_overflow = not scaled_step(self.scaler, self.optimizer, closure)
            self.scaler.update()
        else:
            self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        return losses[0] if losses else None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not taken, because gradients were not finite."""
        return self._is_overflow

    def train(self) -> None:
        """Switch a schedule-free optimizer to training; others have no such modes."""
        self._switch("train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation; others have no such modes."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        optimizer: Any = self.optimizer
        while optimizer is not None and not callable(getattr(optimizer, mode, None)):
            optimizer = getattr(optimizer, "optimizer", None)  # which it wraps
        if optimizer is not None:
            getattr(optimizer, mode)()

    # ---- pickling -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the references to this process and its engine: a copy steps by itself."""
        ties = ("_take_step", "_before_step", "accelerator_state", "gradient_state")
        return {**self.__dict__, **dict.fromkeys(ties)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, in the state of this process, if it has one."""
        self.__dict__.update(state)
        if AcceleratorState._shared_state:
            self.accelerator_state = AcceleratorState()
        self.gradient_state = GradientState()

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def patch_optimizer_step(
    accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """A stand-in for an optimizer's `step` that notes the call in `accelerated_optimizer._accelerate_step_called`.

    Args:
        accelerated_optimizer: Where the call is noted.
        method: The `step` to call.
    """

    def patched_step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True  # type: ignore[attr-defined]
        return method(*args, **kwargs)

    return patched_step


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer without the wrappers of this library."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps need a closure, as those of LBFGS, which decides by its losses how often it is called."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def _noting(closure: Callable[[], Any], losses: list[Any], averages: bool) -> Callable[[], Any]:
    """The closure of a step, which notes what it returns; the optimizer gets the mean over processes where it decides by it."""

    def noted() -> Any:
        losses.append(closure())
        return collectives.reduce(torch.as_tensor(losses[-1]).detach(), "mean") if averages else losses[-1]

    return noted


def _stepped_in_backward(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> bool:
    """LOMO has updated the parameters already."""
    return True
