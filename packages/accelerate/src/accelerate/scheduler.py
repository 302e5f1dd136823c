"""Compatibility path for the prepared scheduler."""

from accel_integrations.prepared.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
