"""The old path of what started processes run first."""

from accel_cli.notebook import PrepareForLaunch as PrepareForLaunch
