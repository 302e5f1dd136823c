"""Compatibility path for what runs around the forward pass of modules."""

from accel_bigmodel.hooks.align import AlignDevicesHook as AlignDevicesHook
from accel_bigmodel.hooks.attach import attach_align_device_hook as attach_align_device_hook
from accel_bigmodel.hooks.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from accel_bigmodel.hooks.attach import attach_execution_device_hook as attach_execution_device_hook
from accel_bigmodel.hooks.cast import LayerwiseCastingHook as LayerwiseCastingHook
from accel_bigmodel.hooks.hook import ModelHook as ModelHook
from accel_bigmodel.hooks.hook import SequentialHook as SequentialHook
from accel_bigmodel.hooks.hook import add_hook_to_module as add_hook_to_module
from accel_bigmodel.hooks.hook import remove_hook_from_module as remove_hook_from_module
from accel_bigmodel.hooks.hook import remove_hook_from_submodules as remove_hook_from_submodules
from accel_bigmodel.hooks.user_offload import CpuOffload as CpuOffload
from accel_bigmodel.hooks.user_offload import UserCpuOffloadHook as UserCpuOffloadHook
from accel_bigmodel.model_methods import MOVERS as _accelerate_added_attributes  # noqa: F401, N811
from accel_bigmodel.offload.loader import PrefixedDataset as PrefixedDataset
from accel_bigmodel.sizes import get_non_persistent_buffers as get_non_persistent_buffers
from accel_bigmodel.sizes import named_module_tensors as named_module_tensors
from accel_bigmodel.tensors import set_module_tensor_to_device as set_module_tensor_to_device
from accel_ops.memory import clear_device_cache as clear_device_cache
from accel_ops.placement import find_device as find_device
from accel_ops.placement import send_to_device as send_to_device
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
