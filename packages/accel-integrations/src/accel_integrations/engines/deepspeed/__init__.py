"""The DeepSpeed engine behind the interface of all engines, and the wrappers that other libraries use."""
