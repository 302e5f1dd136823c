"""Ways in which processes share one model or one batch: transforms along the axes of the mesh."""
