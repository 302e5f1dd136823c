"""The old path of the prepared scheduler."""

from accel_integrations.prepared.scheduler import AcceleratedScheduler as AcceleratedScheduler
