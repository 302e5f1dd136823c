"""Programs that train and measure for a while: `accelerate launch` runs them, on any number of processes."""
