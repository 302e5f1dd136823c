"""Compatibility path for the prepared optimizer."""

from typing import Any

import torch

from accel_integrations.prepared.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_integrations.prepared.optimizer import patch_optimizer_step as patch_optimizer_step
from accel_ops.placement import send_to_device
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here


def move_to_device(state: Any, device: torch.device | str | int) -> Any:
    """A nested structure, such as an optimizer's state, with all tensors on `device`."""
    return send_to_device(state, device)
