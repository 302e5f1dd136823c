"""Tensor, context, sequence, expert and pipeline parallelism: transforms of a model along the dimensions of the mesh."""
