"""Watching that ranks can still meet: who stands where, who waits for whom, and ending a run that can never go on."""
