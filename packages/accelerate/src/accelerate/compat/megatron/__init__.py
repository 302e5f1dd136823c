"""Names that programs for Megatron-LM import. What needs its training package says that it is not there."""
