"""Programs for several processes, started with `accelerate launch`."""
