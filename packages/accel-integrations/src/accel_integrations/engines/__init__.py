"""Training engines: each engine wraps what was prepared and takes the steps."""
