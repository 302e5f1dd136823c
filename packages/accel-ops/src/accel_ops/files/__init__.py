"""Files: formats that run no code when they are read, and writing that leaves nothing half done."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_ops.files.serialization": "load save",
        "accel_ops.files.durable": "write_atomically",
    },
)
