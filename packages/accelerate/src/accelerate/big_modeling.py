"""The old path of models larger than memory, now `accel_bigmodel`."""

from accel_bigmodel.budgets import get_balanced_memory as get_balanced_memory
from accel_bigmodel.device_map.check import check_device_map as check_device_map
from accel_bigmodel.device_map.plan import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.empty import init_empty_weights as init_empty_weights
from accel_bigmodel.empty import init_on_device as init_on_device
from accel_bigmodel.tied import find_tied_parameters as find_tied_parameters
from accel_bigmodel.tied import retie_parameters as retie_parameters
