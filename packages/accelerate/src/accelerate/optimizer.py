"""The old path of the prepared optimizer."""

from accel_integrations.prepared.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
