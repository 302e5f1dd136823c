"""Compatibility path for operations on nested structures."""

from accel_ops.batches import concatenate as concatenate
from accel_ops.batches import find_batch_size as find_batch_size
from accel_ops.batches import get_data_structure as get_data_structure
from accel_ops.batches import get_shape as get_shape
from accel_ops.batches import ignorant_find_batch_size as ignorant_find_batch_size
from accel_ops.batches import initialize_tensors as initialize_tensors
from accel_ops.batches import listify as listify
from accel_ops.batches import pad_input_tensors as pad_input_tensors
from accel_ops.batches import slice_tensors as slice_tensors
from accel_ops.collectives.objects import broadcast_object_list as broadcast_object_list
from accel_ops.collectives.objects import gather_object as gather_object
from accel_ops.collectives.tensors import TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE
from accel_ops.collectives.tensors import TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT
from accel_ops.collectives.tensors import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accel_ops.collectives.tensors import broadcast as broadcast
from accel_ops.collectives.tensors import copy_tensor_to_devices as copy_tensor_to_devices
from accel_ops.collectives.tensors import gather as gather
from accel_ops.collectives.tensors import gather_tensor_shape as gather_tensor_shape
from accel_ops.collectives.tensors import pad_across_processes as pad_across_processes
from accel_ops.collectives.tensors import reduce as reduce
from accel_ops.collectives.verification import chained_operation as chained_operation
from accel_ops.collectives.verification import verify_operation as verify_operation
from accel_ops.dtypes import ConvertOutputsToFp32 as ConvertOutputsToFp32
from accel_ops.dtypes import GatheredParameters as GatheredParameters
from accel_ops.dtypes import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel_ops.dtypes import convert_to_fp32 as convert_to_fp32
from accel_ops.nested import TensorInformation as TensorInformation
from accel_ops.nested import honor_type as honor_type
from accel_ops.nested import is_namedtuple as is_namedtuple
from accel_ops.nested import is_tensor_information as is_tensor_information
from accel_ops.nested import is_torch_tensor as is_torch_tensor
from accel_ops.nested import is_torch_xpu_tensor as is_torch_xpu_tensor
from accel_ops.nested import recursively_apply as recursively_apply
from accel_ops.placement import find_device as find_device
from accel_ops.placement import send_to_device as send_to_device
from accel_state.errors import DistributedOperationException as DistributedOperationException
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
