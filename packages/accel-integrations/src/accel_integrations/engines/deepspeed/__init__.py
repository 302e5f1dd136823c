"""DeepSpeed: the wrappers that other libraries know. Its engine is still to come."""
