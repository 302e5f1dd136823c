"""Compatibility path for weights that are offloaded."""

from accel_bigmodel.offload.folder import load_offloaded_weight as load_offloaded_weight
from accel_bigmodel.offload.folder import offload_state_dict as offload_state_dict
from accel_bigmodel.offload.folder import offload_weight as offload_weight
from accel_bigmodel.offload.folder import save_offload_index as save_offload_index
from accel_bigmodel.offload.loader import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel_bigmodel.offload.loader import PrefixedDataset as PrefixedDataset
from accel_bigmodel.offload.loader import extract_submodules_state_dict as extract_submodules_state_dict
