"""Mixed precision: the dtype in which megatron-core computes, and the loss scale that float16 needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from accel_integrations.precision.loss_scale import GivenScaler
from accel_integrations.precision.registry import make_precision

if TYPE_CHECKING:
    from accel_integrations.precision.precision import Precision
    from accel_state.settings.handlers import Handlers

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of parameters and activations, by `mixed_precision`; None for that of the model."""


def make_own_precision(name: str, device: torch.device, handlers: Handlers) -> Precision:
    """A precision without autocast, because chunks are built in its dtype; that of "fp16" has a scaler.

    Raises:
        NotImplementedError: For a precision that megatron-core's local layers do not have.
    """
    if name not in DTYPES:
        raise NotImplementedError(
            f"mixed_precision={name!r} is not supported with Megatron-LM. Choose from {', '.join(map(repr, DTYPES))}."
        )
    full, precision = (make_precision(one, device.type, handlers) for one in ("no", name))
    return full if precision.scaler is None else GivenScaler(full, precision.scaler)


class ShardedLossScale:
    """Multiplies losses by the scale of the run's `torch.amp.GradScaler`, and divides gradients in shards by it.

    Every rank finds the same norm of all gradients, so all of them skip the same steps. Losses that are sums over tokens,
    divided after the backward passes only, are brought to the size of means, for which scales are made.

    Args:
        scaler: Returns the scaler in use; None where losses are not scaled.
        device: Where gradients are.
        sums: Whether losses are sums over tokens.
    """

    def __init__(self, scaler: Callable[[], torch.amp.GradScaler | None], device: torch.device, *, sums: bool) -> None:
        self._scaler = scaler
        self._device = device
        self._sums = sums
        self._divisor: float | None = None

    def expect(self, num_tokens: int) -> None:
        """Before a step: its losses are sums over up to so many tokens. The first call counts; all ranks make it."""
        if self._divisor is not None or self._started() is None:
            return
        most = torch.tensor([num_tokens if self._sums else 1], device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self._divisor = 2.0 ** (int(most.item()).bit_length() - 1)  # a power of two rounds nothing

    def scale(self, loss: Tensor) -> Tensor:
        """The loss on which megatron-core calls `backward`; only the last pipeline stage has one."""
        scaler = self._started()
        return loss if scaler is None else scaler.scale(loss) / (self._divisor or 1.0)

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients (float32) by the scale, in place."""
        scaler = self._started()
        if scaler is not None and gradients:
            inverse = scaler._scale.double().reciprocal().float()  # type: ignore[union-attr] # it has started
            torch._foreach_mul_(list(gradients), inverse * (self._divisor or 1.0))

    def update(self, norm: Tensor) -> bool:
        """Lower or raise the scale after the backward passes of a step, as `torch.amp.GradScaler.update` does.

        Args:
            norm: The norm of all gradients (0-dim), the same on every rank.

        Returns:
            Whether the step is to be taken: False where gradients are inf or NaN because of the scale.
        """
        scaler = self._started()
        if scaler is None:
            return True
        overflow = (~norm.isfinite()).float().reshape(1)
        scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {self._device: overflow}
        scaler.update()
        return not overflow.item()

    def _started(self) -> torch.amp.GradScaler | None:
        """The scaler, with its scale on the device also where no loss is computed."""
        scaler = self._scaler()
        if scaler is None or not scaler.is_enabled():
            return None
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(self._device)
        return scaler
