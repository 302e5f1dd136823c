"""Precisions: each precision object handles the forward pass, the loss and the optimizer step."""
