"""Runs recorded in local files: written by the tracker "local", read by `accelerate runs`. Imports no torch."""
