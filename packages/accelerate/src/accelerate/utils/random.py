"""Compatibility path for seeds and random states."""

from accel_ops.random import set_seed as set_seed
from accel_ops.random import synchronize_rng_state as synchronize_rng_state
from accel_ops.random import synchronize_rng_states as synchronize_rng_states
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
