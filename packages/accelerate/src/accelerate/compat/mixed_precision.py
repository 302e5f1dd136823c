"""Functions of 1.15 that make an autocast context and a gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel_integrations.precision.autocast import autocast
from accel_state.accelerator_state import AcceleratorState
from accel_state.enums import DistributedType
from accel_state.settings.handlers import AutocastKwargs

AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def _get_proper_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of a name such as `"float16"` or `"torch.float16"`; what is no name comes back as it is.

    Raises:
        AttributeError: torch has no dtype of that name.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    return torch_dtype


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[None]:
    """The autocast context of a forward pass in the mixed precision of the run.

    Args:
        native_amp (`bool`): Whether to use `torch.autocast` at all.
        autocast_kwargs (`AutocastKwargs`, *optional*): How it behaves.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    dtype = AUTOCAST_DTYPES.get(state.mixed_precision)
    if dtype is None and autocast_kwargs is None:
        return nullcontext()
    return autocast(state.device.type, dtype or torch.get_autocast_dtype(state.device.type), autocast_kwargs)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A new gradient scaler for the device of the run.

    Args:
        distributed_type (`DistributedType`, *optional*): Under FSDP, infs are looked for in all shards.
        kwargs: For `torch.amp.GradScaler`.
    """
    from accel_state.devices import detect_device_kind

    device = AcceleratorState().device.type if AcceleratorState._shared_state else detect_device_kind().name
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device, **kwargs)
    return torch.amp.GradScaler(device, **kwargs)
