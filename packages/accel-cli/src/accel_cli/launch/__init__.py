"""`accelerate launch`: from a command line to running processes."""
