"""What a model folder looks like, and how it is written and read."""
