"""Checkpoints that training in several processes leaves behind, and what else they can be turned into."""
