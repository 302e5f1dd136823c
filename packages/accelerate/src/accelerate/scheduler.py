"""The old path of the prepared scheduler."""

from accel_integrations.prepared.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.neighbours import found_among_neighbours

__getattr__ = found_among_neighbours(__name__)  # what others import from here
