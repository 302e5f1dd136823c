"""Collectives: over tensors in nested structures, over objects, and what carries them between ranks."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_ops.collectives.tensors": "broadcast copy_tensor_to_devices gather pad_across_processes reduce "
        "wait_for_everyone",
        "accel_ops.collectives.objects": "broadcast_object_list gather_object",
    },
)
