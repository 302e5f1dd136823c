"""Compatibility path for the progress bar, now `accel_tracking.progress`."""

from accel_tracking.progress import tqdm as tqdm
