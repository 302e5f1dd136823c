"""Models larger than memory: sharded weight files, and (to come) placement, offload and streaming."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"accel_bigmodel.checkpoint.write": "parse_size split_into_shards write_model_folder"}
)
