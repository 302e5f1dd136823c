"""Compatibility path for version comparisons, now `accel_state.libraries`."""

from accel_state.libraries import compare_versions as compare_versions
from accel_state.libraries import is_torch_version as is_torch_version
from accel_state.libraries import torch_version as torch_version
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
