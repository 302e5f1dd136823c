"""Precisions: each precision object knows how the forward, the loss and the step are to be treated."""
