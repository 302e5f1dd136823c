"""Run PyTorch training on any hardware, at any scale, without changing the program."""
