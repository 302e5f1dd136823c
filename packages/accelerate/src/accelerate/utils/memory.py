"""Compatibility path for memory helpers."""

from accel_ops.memory import clear_device_cache as clear_device_cache
from accel_ops.memory import find_executable_batch_size as find_executable_batch_size
from accel_ops.memory import get_xpu_available_memory as get_xpu_available_memory
from accel_ops.memory import release_memory as release_memory
from accel_ops.memory import should_reduce_batch_size as should_reduce_batch_size
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
