"""Data loaders that yield every process its shard of the dataset, exactly once, and resume where they stopped."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_data.streams": "IterableDatasetShard SplitStream find_split",
        "accel_data.samplers": "BatchSamplerShard SeedableRandomSampler SkipBatchSampler get_sampler",
        "accel_data.adapter": "DataLoaderAdapter DataLoaderStateMixin",
        "accel_data.loader_shard": "DataLoaderShard",
        "accel_data.dispatcher": "DataLoaderDispatcher",
        "accel_data.skipping": "SkipDataLoader skip_first_batches",
        "accel_data.prepare": "prepare_data_loader",
    },
)
