"""The formats of stored models and optimizers: full, sharded (FSDP) and ZeRO."""
