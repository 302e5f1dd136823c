"""A loss scaler for gradients of which every process holds other parts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from accel_ops.modules import to_local
from accel_ops.transport import collective_device


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, but when one process finds gradients that are not finite, all skip the step.

    Args:
        device: The type of device to compute on.
        process_group: Who must agree; all processes when None.
        kwargs: As for `torch.amp.GradScaler`.
    """

    def __init__(self, device: str = "cuda", process_group: Any = None, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.process_group = process_group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Divide what this process holds of the gradients by the scale, and ask the others what they found."""
        parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = to_local(parameter.grad)
                    parts[part.device, part.dtype].append(part)
        found: dict[torch.device, torch.Tensor] = {}
        with torch.no_grad():
            for (device, _), gradients in parts.items():
                here = found.setdefault(device, torch.zeros_like(found_inf, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inv_scale.to(device))
            return self._agree(found, found_inf)

    def _agree(
        self, found: dict[torch.device, torch.Tensor], found_inf: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        wire = collective_device(self.process_group)
        worst = torch.zeros_like(found_inf, device=wire)
        for value in found.values():
            worst = torch.maximum(worst, value.to(wire))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.process_group)
        for device in found or [found_inf.device]:
            found[device] = worst.to(device)
        return found
