"""Data loaders that give every process its share, exactly once, and resume where they stopped."""
