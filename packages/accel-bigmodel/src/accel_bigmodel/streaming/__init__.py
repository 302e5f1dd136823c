"""Prefetching of offloaded weights."""
