"""Names that programs for Megatron-LM import. What needs the package megatron.training raises `NotImplementedError`."""
