"""Shims for names that programs for Megatron-LM import. What needs its training package raises `NotImplementedError`."""
