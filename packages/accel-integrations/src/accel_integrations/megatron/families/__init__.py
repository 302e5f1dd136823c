"""Model types of transformers in megatron-core's terms: `table` lists them."""
