"""Weights that are on their way before they are needed."""
