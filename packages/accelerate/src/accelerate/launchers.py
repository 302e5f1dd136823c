"""Compatibility path for starting processes from Python."""

from accel_cli.notebook import debug_launcher as debug_launcher
from accel_cli.notebook import notebook_launcher as notebook_launcher
from accel_cli.notebook import test_launch as test_launch
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
