"""Weights that wait in main memory or on disk."""
