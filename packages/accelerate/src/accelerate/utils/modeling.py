"""Compatibility path for questions about models, and of planning where they go."""

from accel_bigmodel.budgets import get_balanced_memory as get_balanced_memory
from accel_bigmodel.budgets import get_max_memory as get_max_memory
from accel_bigmodel.device_map.check import check_device_map as check_device_map
from accel_bigmodel.device_map.check import check_device_same as check_device_same
from accel_bigmodel.device_map.check import check_tied_parameters_in_config as check_tied_parameters_in_config
from accel_bigmodel.device_map.check import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accel_bigmodel.device_map.modules import clean_device_map as clean_device_map
from accel_bigmodel.device_map.modules import fallback_allocate as fallback_allocate
from accel_bigmodel.device_map.plan import get_module_size_with_ties as get_module_size_with_ties
from accel_bigmodel.device_map.plan import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.offload.collect import get_state_dict_from_offload as get_state_dict_from_offload
from accel_bigmodel.offload.collect import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from accel_bigmodel.offload.collect import load_offloaded_weights as load_offloaded_weights
from accel_bigmodel.offload.folder import load_offloaded_weight as load_offloaded_weight
from accel_bigmodel.offload.folder import offload_weight as offload_weight
from accel_bigmodel.offload.folder import save_offload_index as save_offload_index
from accel_bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_bigmodel.sizes import compute_module_sizes as compute_module_sizes
from accel_bigmodel.sizes import compute_module_total_buffer_size as compute_module_total_buffer_size
from accel_bigmodel.sizes import convert_file_size_to_int as convert_file_size_to_int
from accel_bigmodel.sizes import dtype_byte_size as dtype_byte_size
from accel_bigmodel.sizes import get_max_layer_size as get_max_layer_size
from accel_bigmodel.sizes import get_module_leaves as get_module_leaves
from accel_bigmodel.sizes import get_non_persistent_buffers as get_non_persistent_buffers
from accel_bigmodel.sizes import named_module_tensors as named_module_tensors
from accel_bigmodel.tensors import align_module_device as align_module_device
from accel_bigmodel.tensors import set_module_tensor_to_device as set_module_tensor_to_device
from accel_bigmodel.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_bigmodel.weights.load import load_state_dict as load_state_dict
from accel_ops.files.filenames import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accel_ops.modules import has_offloaded_params as has_offloaded_params
from accel_ops.modules import is_peft_model as is_peft_model
from accel_ops.tied import find_tied_parameters as find_tied_parameters
from accel_ops.tied import id_tensor_storage as id_tensor_storage
from accel_ops.tied import retie_parameters as retie_parameters
from accelerate.compat.legacy import legacy_getattr
from accelerate.compat.mixed_precision import _get_proper_dtype as _get_proper_dtype
from accelerate.compat.mixed_precision import get_grad_scaler as get_grad_scaler
from accelerate.compat.mixed_precision import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)

__getattr__ = legacy_getattr(__name__)  # what programs import from here
