"""Training states on disk: written so that a kill at any moment leaves the last one whole, and verified when read."""
