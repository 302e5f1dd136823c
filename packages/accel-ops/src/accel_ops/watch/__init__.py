"""Deadlock detection: where each rank is blocked, which ranks it waits for, and aborting a run that is deadlocked."""
