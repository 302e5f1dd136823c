"""An older path of the search for a batch size."""

from accel_ops.memory import find_executable_batch_size as find_executable_batch_size
