"""Compatibility path for `ParallelismConfig`, now `accel_state.mesh`."""

from accel_state.mesh import ParallelismConfig as ParallelismConfig
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
