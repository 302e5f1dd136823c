"""What carries out a plan: one module per way of starting processes."""
