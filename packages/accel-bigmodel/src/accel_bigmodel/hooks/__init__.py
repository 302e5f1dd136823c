"""What runs before and after the forward pass of a module."""
