"""The command `accelerate examples`, and the examples themselves, in `files`."""
