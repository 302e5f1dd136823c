"""The old paths of the commands, now in `accel_cli`."""
