"""Nested structures, collectives, randomness, memory and safe files for PyTorch programs on any number of processes."""
