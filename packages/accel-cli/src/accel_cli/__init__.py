"""The accelerate command line and the launchers."""
