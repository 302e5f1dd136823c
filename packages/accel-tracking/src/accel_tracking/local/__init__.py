"""Runs recorded in files of one's own: written by the tracker "local", read by `accelerate runs`. Loads no torch."""
