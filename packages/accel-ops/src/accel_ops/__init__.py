"""Nested structures, collectives, randomness, memory and safe files, on any number of processes."""

from accel_state.group_events import on_group_started
from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_ops.nested": "TensorInformation honor_type is_namedtuple is_torch_tensor merge_dicts recursively_apply",
        "accel_ops.batches": "concatenate find_batch_size get_data_structure initialize_tensors listify "
        "pad_input_tensors slice_tensors",
        "accel_ops.placement": "find_device send_to_device",
        "accel_ops.collectives.tensors": "broadcast copy_tensor_to_devices gather pad_across_processes reduce wait_for_everyone",
        "accel_ops.collectives.objects": "broadcast_object_list gather_object",
        "accel_ops.dtypes": "ConvertOutputsToFp32 convert_outputs_to_fp32 convert_to_fp32",
        "accel_ops.random": "capture_rng_state restore_rng_state set_seed synchronize_rng_state "
        "synchronize_rng_states",
        "accel_ops.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
        "accel_ops.modules": "has_compiled_regions is_compiled_module model_has_dtensor",
        "accel_ops.files.serialization": "load save",
        "accel_ops.files.durable": "write_atomically",
        "accel_ops.tied": "find_tied_parameters retie_parameters",
    },
)

on_group_started("accel_ops.watch.this_process")  # whoever imports a collective has its ranks watched
