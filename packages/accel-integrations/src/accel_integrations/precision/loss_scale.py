"""Loss scaling, so that small gradients do not underflow in float16; with sharded gradients, all ranks skip the same steps."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState
from typing_extensions import override

from accel_integrations.precision.autocast import AutocastPrecision
from accel_integrations.precision.precision import Precision
from accel_ops.collectives.transport import collective_device
from accel_ops.modules import to_local
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
    instance_step = vars(optimizer).get("step")  # schedulers put a counting one on the instance

    def noticed(*args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        taken = True
        return step(*args, **kwargs)

    noticed.__wrapped__ = step  # type: ignore[attr-defined] # the scaler looks for an argument in its signature
    optimizer.step = noticed  # type: ignore[method-assign]
    try:
        scaler.step(optimizer, closure) if closure is not None else scaler.step(optimizer)
    finally:
        if instance_step is None:
            del optimizer.step
        else:
            optimizer.step = instance_step  # type: ignore[method-assign]
    return taken


class LossScale(Precision):
    """A precision whose losses are scaled by a `torch.amp.GradScaler`.

    The loss scale is updated once all optimizers have stepped, because inf values in the gradients of one must not
    change the scale by which those of the others are divided. When only some step, it is updated before the next
    backward pass.

    Args:
        scaler: The gradient scaler.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._first_state = scaler.state_dict()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._must_update = False

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The gradient scaler, used from the next loss on. One that is replaced takes note of its last step."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler) -> None:
        if self._must_update:
            self._update()
        self._scaler = scaler
        self._first_state = scaler.state_dict()

    @override
    def forget(self) -> None:
        """The loss scale that the scaler was made with."""
        self._must_update = False
        if self._first_state:  # an enabled scaler's
            self._scaler.load_state_dict(self._first_state)

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the loss scale only after this optimizer, too, has stepped."""
        self._optimizers.add(optimizer)

    @override
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the current scale."""
        if self._must_update:
            self._update()
        return self._scaler.scale(loss)

    @override
    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale; asked twice within a step, it does so once.

        Raises:
            RuntimeError: No loss was ever scaled.
        """
        self._check_scaled()
        if self._stage_of(optimizer) is OptState.READY:  # torch raises the second time
            self._scaler.unscale_(optimizer)

    @override
    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Take a step unless gradients are not finite.

        Raises:
            RuntimeError: No loss was ever scaled.
        """
        self._check_scaled()
        if self._stage_of(optimizer) is OptState.STEPPED:
            self._update()
        taken = scaled_step(self._scaler, optimizer, closure)
        self._must_update = True
        if all(self._stage_of(each) is OptState.STEPPED for each in self._optimizers):
            self._update()
        return taken

    def _check_scaled(self) -> None:
        if self._scaler.is_enabled() and self._scaler._scale is None:  # the first loss sets it
            raise RuntimeError(
                f"mixed_precision={self.name!r}: gradients are divided by the loss scale, but no loss was multiplied by it. Call "
                "accelerator.backward(loss) instead of loss.backward()."
            )

    def _stage_of(self, optimizer: torch.optim.Optimizer) -> OptState | None:
        """The optimizer's stage since the last update of the scaler; None when the scaler is disabled."""
        if not self._scaler.is_enabled():
            return None
        stage: OptState = self._scaler._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _update(self) -> None:
        self._must_update = False
        self._scaler.update()

    # ---- storing ------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any] | None:
        """The scale and its history."""
        if self._must_update:
            self._update()
        return self._scaler.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and its history."""
        self._scaler.load_state_dict(state)


@final
class Float16Precision(AutocastPrecision, LossScale):
    """float16 where it is safe, by `torch.autocast`, with `torch.amp.GradScaler`.

    Args:
        device_type: The type of device to compute on.
        handlers: May hold how autocast and the scaler behave.
        scaler_class: `torch.amp.GradScaler`, or `ShardedGradScaler` for sharded gradients.
    """

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self, device_type: str, handlers: Handlers, scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler
    ) -> None:
        options = handlers.grad_scaler.to_kwargs() if handlers.grad_scaler is not None else {}
        AutocastPrecision.__init__(self, device_type, handlers)
        LossScale.__init__(self, scaler_class(device_type, **options))


@final
class GivenScaler(LossScale):
    """Another precision, with a scaler that the program brought.

    Args:
        precision: What it computes in; one that scales no losses.
        scaler: The gradient scaler.
    """

    name = "no"

    def __init__(self, precision: Precision, scaler: torch.amp.GradScaler) -> None:
        super().__init__(scaler)
        self.name = precision.name  # type: ignore[misc] # not of the class here
        self._precision = precision

    @override
    def convert(self, model: nn.Module) -> nn.Module:
        """As the other precision does."""
        return self._precision.convert(model)

    @override
    def wrap_forward(self, model: nn.Module) -> nn.Module:
        """As the other precision does."""
        return self._precision.wrap_forward(model)

    @override
    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """As the other precision does."""
        return self._precision.autocast(handler)


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, but when one rank finds gradients that are not finite, all ranks skip the step.

    Args:
        device: The type of device to compute on.
        process_group: The ranks that skip together; all when None.
        kwargs: As for `torch.amp.GradScaler`.
    """

    def __init__(self, device: str = "cuda", process_group: Any = None, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.process_group = process_group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale the gradient shards of this rank, and all-reduce whether any rank found inf or NaN."""
        shards: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shard = to_local(parameter.grad)
                    shards[shard.device, shard.dtype].append(shard)
        flags: dict[torch.device, torch.Tensor] = {}
        with torch.no_grad():
            for (device, _), gradients in shards.items():
                here = flags.setdefault(device, torch.zeros_like(found_inf, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inv_scale.to(device))
            return self._all_reduce_found_inf(flags, found_inf)

    def _all_reduce_found_inf(
        self, flags: dict[torch.device, torch.Tensor], found_inf: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        wire = collective_device(self.process_group)
        worst = torch.zeros_like(found_inf, device=wire)
        for value in flags.values():
            worst = torch.maximum(worst, value.to(wire))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.process_group)
        for device in flags or [found_inf.device]:
            flags[device] = worst.to(device)
        return flags


def sharded_float16(device_type: str, handlers: Handlers) -> Float16Precision:
    """float16 for sharded gradients: all ranks skip the same steps."""
    return Float16Precision(device_type, handlers, ShardedGradScaler)
