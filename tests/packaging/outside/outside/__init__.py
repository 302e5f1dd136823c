"""A package that knows the accelerate packages, and is not known by them: it adds one thing of each kind from outside."""
