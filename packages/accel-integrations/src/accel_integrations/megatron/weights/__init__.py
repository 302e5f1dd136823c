"""Tensors in shards: how they are built and sharded (`layouts`), gathered (`sharded`) and updated (`optimizer`)."""
