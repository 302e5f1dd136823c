"""Models larger than memory: sharded weight files, and (to come) placement, offload and streaming."""
