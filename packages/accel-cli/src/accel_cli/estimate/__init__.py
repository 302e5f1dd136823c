"""The command `accelerate estimate-memory`: what a model needs, without loading it."""
