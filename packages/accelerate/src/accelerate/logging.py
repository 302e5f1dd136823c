"""The old path of logging from many processes, now `accel_state.logging`."""

from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter
from accel_state.logging import get_logger as get_logger
from accelerate.neighbours import found_among_neighbours

__getattr__ = found_among_neighbours(__name__)  # what others import from here
