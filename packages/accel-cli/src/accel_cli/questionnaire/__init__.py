"""The questions of `accelerate config`, one module per topic."""
