"""Compatibility path for the states, now `accel_state`."""

from accel_state.accelerator_state import AcceleratorState as AcceleratorState
from accel_state.gradient_state import GradientState as GradientState
from accel_state.processes import PartialState as PartialState
from accel_state.processes import do_nothing as do_nothing
from accel_state.processes import is_initialized as is_initialized
from accel_state.shared import SharedDict as SharedDict
from accel_state.shared import ThreadLocalSharedDict as ThreadLocalSharedDict
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
