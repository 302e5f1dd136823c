"""Watching running processes: where they hang, and what they die of."""
