"""The old path of `ParallelismConfig`, now `accel_state.mesh`."""

from accel_state.mesh import ParallelismConfig as ParallelismConfig
