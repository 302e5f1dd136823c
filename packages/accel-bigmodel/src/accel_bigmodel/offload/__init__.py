"""Offloaded weights: in CPU memory or on disk."""
