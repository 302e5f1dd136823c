"""The engine for Megatron-LM, on megatron-core."""
