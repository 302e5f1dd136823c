"""The old path of seeds and random states."""

from accel_ops.random import set_seed as set_seed
from accel_ops.random import synchronize_rng_state as synchronize_rng_state
from accel_ops.random import synchronize_rng_states as synchronize_rng_states
from accelerate.neighbours import found_among_neighbours

__getattr__ = found_among_neighbours(__name__)  # what others import from here
