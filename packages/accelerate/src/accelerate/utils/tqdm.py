"""The old path of the progress bar, now `accel_tracking.progress`."""

from accel_tracking.progress import tqdm as tqdm
