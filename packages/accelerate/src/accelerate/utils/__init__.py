"""Compatibility path for everything that is no method of `Accelerator`; each name is loaded when first asked for."""

from importlib import import_module
from typing import Any

from accel_state.lazy import lazy_exports
from accel_state.warning import warn_user

# a function and a module of one name: bound before an import of the module could hide the function
from accelerate.utils.tqdm import tqdm as tqdm

EXPORTS = {
    "accel_bigmodel.budgets": "get_balanced_memory get_max_memory",
    "accel_bigmodel.weights.load": "load_checkpoint_in_model load_state_dict",
    "accel_bigmodel.device_map.check": (
        "check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device"
    ),
    "accel_bigmodel.device_map.plan": "infer_auto_device_map",
    "accel_bigmodel.offload.collect": "load_offloaded_weights",
    "accel_bigmodel.offload.folder": "load_offloaded_weight offload_state_dict offload_weight save_offload_index",
    "accel_bigmodel.offload.loader": "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict",
    "accel_bigmodel.sizes": (
        "calculate_maximum_sizes compute_module_sizes convert_file_size_to_int dtype_byte_size get_max_layer_size "
        "named_module_tensors"
    ),
    "accel_bigmodel.tensors": "align_module_device set_module_tensor_to_device",
    "accel_cli.configfile.write": "write_basic_config",
    "accelerate.compat.launching": (
        "prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_sagemager_args_inputs "
        "prepare_simple_launcher_cmd_env prepare_tpu"
    ),
    "accel_cli.notebook": "PrepareForLaunch",
    "accel_integrations.bitsandbytes.layers": "has_4bit_bnb_layers",
    "accel_integrations.bitsandbytes.quantize": "load_and_quantize_model",
    "accel_integrations.bitsandbytes.settings": "BnbQuantizationConfig",
    "accel_integrations.training_state.merge": "merge_fsdp_weights",
    "accel_integrations.training_state.fsdp_functions": (
        "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer"
    ),
    "accel_integrations.compile": "compile_regions compile_regions_deepspeed compile_regions_fsdp2",
    "accelerate.compat.fsdp": (
        "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac "
        "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters "
        "get_fsdp2_grad_scaler"
    ),
    "accel_integrations.deepspeed_dummies": "DummyOptim DummyScheduler",
    "accel_integrations.engines.deepspeed.startup": "get_active_deepspeed_plugin",
    "accel_integrations.engines.deepspeed.prepare_arguments": "map_pytorch_optim_to_deepspeed",
    "accel_integrations.engines.deepspeed.wrappers": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper"
    ),
    "accel_integrations.megatron.model": "MegatronEngine",
    "accel_integrations.megatron.placeholders": "MegatronLMDummyDataLoader MegatronLMDummyScheduler",
    "accel_integrations.megatron.prepared": "MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper",
    "accelerate.compat.megatron.functions": (
        "avg_losses_across_data_parallel_group gather_across_data_parallel_groups megatron_lm_initialize=initialize "
        "megatron_lm_prepare_data_loader=prepare_data_loader "
        "megatron_lm_prepare_model_optimizer_scheduler=prepare_model_optimizer_scheduler "
        "megatron_lm_prepare_optimizer=prepare_optimizer megatron_lm_prepare_scheduler=prepare_scheduler"
    ),
    "accelerate.compat.megatron.train_steps": "AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep",
    "accel_integrations.precision.float8_layers": (
        "convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers"
    ),
    "accelerate.compat.mixed_precision": "get_grad_scaler get_mixed_precision_context_manager",
    "accel_integrations.precision.transformer_engine": (
        "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers"
    ),
    "accel_integrations.unwrap": "extract_model_from_parallel",
    "accel_ops.batches": (
        "concatenate find_batch_size get_data_structure ignorant_find_batch_size initialize_tensors listify "
        "pad_input_tensors slice_tensors"
    ),
    "accel_ops.collectives.tensors": (
        "broadcast CannotPadNestedTensorWarning copy_tensor_to_devices gather pad_across_processes reduce "
        "wait_for_everyone"
    ),
    "accel_ops.dtypes": "convert_outputs_to_fp32 convert_to_fp32 GatheredParameters",
    "accel_ops.files.filenames": (
        "MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME "
        "SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME WEIGHTS_INDEX_NAME "
        "WEIGHTS_NAME WEIGHTS_PATTERN_NAME"
    ),
    "accel_ops.files.serialization": "load save",
    "accel_ops.memory": "convert_bytes find_executable_batch_size release_memory",
    "accel_ops.modules": (
        "get_model_tp_size get_module_children_bottom_up get_pretty_name has_compiled_regions has_offloaded_params "
        "is_compiled_module is_peft_model model_has_dtensor"
    ),
    "accel_ops.nested": (
        "honor_type is_namedtuple is_tensor_information is_torch_tensor merge_dicts recursive_getattr "
        "recursively_apply TensorInformation"
    ),
    "accel_ops.placement": "find_device send_to_device",
    "accel_ops.collectives.objects": "broadcast_object_list gather_object",
    "accel_ops.random": "set_seed synchronize_rng_state synchronize_rng_states",
    "accel_ops.files.tensor_files": "clean_state_dict_for_safetensors",
    "accel_ops.tied": "find_tied_parameters id_tensor_storage retie_parameters",
    "accel_state.constants": (
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS "
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION"
    ),
    "accel_state.enums": (
        "ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend LoggerType "
        "PrecisionType RNGType SageMakerDistributedType"
    ),
    "accel_state.environment": (
        "are_libraries_initialized clear_environment convert_dict_to_env_variables get_cpu_distributed_information "
        "get_int_from_env parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment "
        "str_to_bool"
    ),
    "accel_state.hardware": (
        "get_current_device_type is_bf16_available is_cuda_available is_fp16_available is_habana_gaudi1 "
        "is_hpu_available is_mlu_available is_mps_available is_musa_available is_neuron_available is_npu_available "
        "is_rocm_available is_sdaa_available is_xpu_available"
    ),
    "accel_state.libraries": (
        "compare_versions deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available "
        "is_amdsmi_available is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available "
        "is_clearml_available is_comet_ml_available is_datasets_available is_deepspeed_available "
        "is_dvclive_available is_fp8_available is_import_timer_available is_ipex_available is_lomo_available "
        "is_matplotlib_available is_megatron_lm_available is_mlflow_available is_msamp_available "
        "is_pandas_available is_peft_available is_pippy_available is_pynvml_available is_pytest_available "
        "is_rich_available is_sagemaker_available is_schedulefree_available is_swanlab_available "
        "is_tensorboard_available is_timm_available is_torch_version is_torch_xla_available is_torchao_available "
        "is_torchdata_available is_torchdata_stateful_dataloader_available is_torchvision_available "
        "is_trackio_available is_transformer_engine_available is_transformer_engine_mxfp8_available "
        "is_transformers_available is_triton_available is_wandb_available is_weights_only_available "
        "is_xccl_available torchao_required"
    ),
    "accel_state.mesh": "ParallelismConfig",
    "accel_state.numa": "set_numa_affinity",
    "accel_state.nvidia": "check_cuda_fp8_capability check_cuda_p2p_ib_support get_gpu_info",
    "accel_state.settings.accumulation": "GradientAccumulationPlugin",
    "accel_state.settings.compile": "TorchDynamoPlugin",
    "accel_state.settings.data": "DataLoaderConfiguration",
    "accel_state.settings.ddp": "DistributedDataParallelKwargs",
    "accel_state.settings.deepspeed": "DeepSpeedPlugin",
    "accel_state.settings.deepspeed_auto": "HfDeepSpeedConfig",
    "accel_state.settings.fp8": "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    "accel_state.settings.fsdp": "FullyShardedDataParallelPlugin",
    "accel_state.settings.handlers": "AutocastKwargs GradScalerKwargs InitProcessGroupKwargs KwargsHandler",
    "accel_state.settings.megatron": "MegatronLMPlugin",
    "accel_state.settings.megatron_models": "add_model_config_to_megatron_parser",
    "accel_state.settings.parallelism": (
        "DeepSpeedSequenceParallelConfig PipelineParallelConfig TorchContextParallelConfig TorchTensorParallelConfig "
        "TorchTensorParallelPlugin"
    ),
    "accel_state.settings.finite_gradients": "FiniteGradientsKwargs",
    "accel_state.settings.profile": "ProfileKwargs",
    "accel_state.settings.project": "ProjectConfiguration",
    "accelerate.utils.other": "check_os_kernel is_port_in_use",
    "accelerate.utils.torch_xla": "install_xla",
}
SUBMODULES = (
    "ao",
    "bnb",
    "constants",
    "dataclasses",
    "deepspeed",
    "environment",
    "fsdp_utils",
    "imports",
    "launch",
    "megatron_lm",
    "memory",
    "modeling",
    "offload",
    "operations",
    "other",
    "random",
    "torch_xla",
    "transformer_engine",
    "versions",
)

RENAMED = {  # names that some documents write
    "DeepSpeedEnginerWrapper": "DeepSpeedEngineWrapper",
    "FP8KwargsHandler": "FP8RecipeKwargs",
}

_export, __dir__, __all__ = lazy_exports(__name__, EXPORTS)
__all__ += ["tqdm"]


def __getattr__(name: str) -> Any:
    if name in SUBMODULES:  # `import accelerate` is enough to write `accelerate.utils.constants`
        return import_module(f"{__name__}.{name}")
    if name in RENAMED:
        warn_user(f"accelerate.utils.{name} is a deprecated alias. Import {RENAMED[name]}.", FutureWarning)
        return _export(RENAMED[name])
    return _export(name)
