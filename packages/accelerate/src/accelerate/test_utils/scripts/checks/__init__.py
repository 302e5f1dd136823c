"""The checks of `accelerate test`, by what they are about."""
