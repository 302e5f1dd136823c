"""Who am I: processes, devices, settings and logging for PyTorch programs on any hardware."""
