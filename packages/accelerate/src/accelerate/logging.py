"""Compatibility path for logging from many processes, now `accel_state.logging`."""

from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter
from accel_state.logging import get_logger as get_logger
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
