"""Who am I: processes, devices, settings and logging for PyTorch programs on any hardware."""

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accel_state.accelerator_state": "AcceleratorState",
        "accel_state.clusters": "ClusterPlace detect_cluster",
        "accel_state.devices": "DEVICE_KINDS DeviceKind default_device detect_device_kind device_kind resolve_device",
        "accel_state.enums": (
            "ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend FP8BackendType "
            "LoggerType PrecisionType RNGType SageMakerDistributedType"
        ),
        "accel_state.environment": "clear_environment parse_flag_from_env patch_environment str_to_bool",
        "accel_state.errors": "DistributedOperationException MissingLibraryError",
        "accel_state.gradient_state": "GradientState",
        "accel_state.libraries": "compare_versions is_torch_version",
        "accel_state.logging": "MultiProcessAdapter get_logger",
        "accel_state.mesh": "ParallelismConfig",
        "accel_state.mesh_axes": "DataShard",
        "accel_state.numa": "override_numa_affinity set_numa_affinity",
        "accel_state.processes": "PartialState is_initialized",
        "accel_state.settings.accumulation": "GradientAccumulationPlugin",
        "accel_state.settings.compile": "TorchDynamoPlugin",
        "accel_state.settings.data": "DataLoaderConfiguration",
        "accel_state.settings.ddp": "DistributedDataParallelKwargs",
        "accel_state.settings.fp8": "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
        "accel_state.settings.fsdp": "FullyShardedDataParallelPlugin",
        "accel_state.settings.handlers": "AutocastKwargs GradScalerKwargs InitProcessGroupKwargs KwargsHandler",
        "accel_state.settings.parallelism": (
            "DeepSpeedSequenceParallelConfig PipelineParallelConfig TorchContextParallelConfig TorchTensorParallelConfig "
            "TorchTensorParallelPlugin"
        ),
        "accel_state.settings.finite_gradients": "FiniteGradientsKwargs",
        "accel_state.settings.profile": "ProfileKwargs",
        "accel_state.settings.project": "ProjectConfiguration",
    },
)
