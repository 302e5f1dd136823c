"""Measurements against accelerate 1.15 and against the raw floor, in one run."""
