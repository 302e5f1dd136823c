"""One file per service; each loads its service's library when a run starts, not before."""
