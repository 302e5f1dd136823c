"""Who am I: processes, devices, settings and logging for PyTorch programs on any hardware."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_state.processes": "PartialState",
        "accel_state.accelerator_state": "AcceleratorState",
        "accel_state.gradient_state": "GradientState",
        "accel_state.devices": "DEVICE_KINDS DeviceKind default_device detect_device_kind device_kind",
        "accel_state.clusters": "detect_cluster",
        "accel_state.logging": "get_logger",
        "accel_state.mesh": "DataPlace ParallelismConfig",
        "accel_state.enums": "DistributedType DynamoBackend LoggerType PrecisionType RNGType",
        "accel_state.environment": "clear_environment patch_environment",
        "accel_state.errors": "DistributedOperationException MissingLibraryError",
        "accel_state.settings.accumulation": "GradientAccumulationPlugin",
        "accel_state.settings.compile": "TorchDynamoPlugin",
        "accel_state.settings.data": "DataLoaderConfiguration",
        "accel_state.settings.ddp": "DistributedDataParallelKwargs",
        "accel_state.settings.fsdp": "FullyShardedDataParallelPlugin",
        "accel_state.settings.handlers": "AutocastKwargs GradScalerKwargs InitProcessGroupKwargs",
        "accel_state.settings.profile": "ProfileKwargs",
        "accel_state.settings.project": "ProjectConfiguration",
    },
)
