"""Experiment tracking, progress bars and profiling that behave on many processes."""
