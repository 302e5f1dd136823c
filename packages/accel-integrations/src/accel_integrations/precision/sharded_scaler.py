"""A loss scaler for sharded gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from accel_integrations.precision.loss_scale import Float16Precision
from accel_ops.collectives.transport import collective_device
from accel_ops.modules import to_local
from accel_state.settings.handlers import Handlers


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
