"""Reading and writing the states of models and optimizers in checkpoints, full or sharded, and merging shards."""
