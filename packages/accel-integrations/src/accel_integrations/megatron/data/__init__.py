"""What models read: kinds of models (`tasks`), batches, sequences over context-parallel ranks, Megatron-LM's datasets."""
