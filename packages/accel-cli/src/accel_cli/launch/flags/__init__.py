"""The options of `accelerate launch`, one row each."""
