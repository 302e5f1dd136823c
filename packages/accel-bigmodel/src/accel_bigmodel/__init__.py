"""Models larger than memory: built without weights, measured, placed on devices, in memory and on disk."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_bigmodel.budgets": "get_balanced_memory get_max_memory",
        "accel_bigmodel.weights.compare": "CheckpointMismatchError",
        "accel_bigmodel.weights.index": "find_checkpoint",
        "accel_bigmodel.weights.load": "load_checkpoint_in_model load_state_dict",
        "accel_ops.files.mapped": "MappedShard mapped_shard",
        "accel_bigmodel.weights.write": "parse_size split_into_shards write_model_folder",
        "accel_bigmodel.device_map.check": (
            "check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device"
        ),
        "accel_bigmodel.device_map.modules": "clean_device_map",
        "accel_bigmodel.device_map.plan": "infer_auto_device_map",
        "accel_bigmodel.dispatch": "cpu_offload disk_offload dispatch_model load_checkpoint_and_dispatch",
        "accel_bigmodel.empty": "init_empty_weights init_on_device",
        "accel_bigmodel.hooks.align": "AlignDevicesHook",
        "accel_bigmodel.hooks.attach": (
            "attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook materialize_meta_tensors"
        ),
        "accel_bigmodel.hooks.cast": "LayerwiseCastingHook attach_layerwise_casting_hooks",
        "accel_bigmodel.hooks.hook": (
            "ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules"
        ),
        "accel_bigmodel.hooks.user_offload": "CpuOffload UserCpuOffloadHook cpu_offload_with_hook",
        "accel_bigmodel.offload.collect": "get_state_dict_from_offload get_state_dict_offloaded_model",
        "accel_bigmodel.offload.folder": (
            "load_offloaded_weight offload_state_dict offload_weight save_offload_index"
        ),
        "accel_bigmodel.offload.loader": "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict",
        "accel_bigmodel.sizes": (
            "calculate_maximum_sizes compute_module_sizes convert_file_size_to_int dtype_byte_size get_max_layer_size "
            "named_module_tensors"
        ),
        "accel_bigmodel.streaming.report": "OffloadReport offload_report",
        "accel_bigmodel.streaming.settings": "Streaming",
        "accel_bigmodel.tensors": "align_module_device set_module_tensor_to_device",
        "accel_ops.tied": "find_tied_parameters retie_parameters",
    },
)
