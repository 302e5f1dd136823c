"""The old path of the prepared optimizer."""

from accel_integrations.prepared.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_integrations.prepared.optimizer import move_to_device as move_to_device
from accel_integrations.prepared.optimizer import patch_optimizer_step as patch_optimizer_step
