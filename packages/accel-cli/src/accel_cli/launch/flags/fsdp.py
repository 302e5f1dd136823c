"""Options of fully sharded data parallelism."""

from __future__ import annotations

from accel_cli.arguments import Option, lower
from accel_cli.launch.flags.group import OptionGroup

FSDP = OptionGroup(
    "FSDP Arguments",
    (
        Option("--fsdp_version", "Which of torch's two implementations.", default="1", choices=("1", "2"),
               environment="FSDP_VERSION"),
        Option("--fsdp_offload_params", "Keep parameters and gradients in CPU memory: true or false.",
               default="false", metavar="BOOL", environment="FSDP_OFFLOAD_PARAMS", spelled=lower),
        Option("--fsdp_min_num_params", "Wrap blocks of at least so many parameters (SIZE_BASED_WRAP).",
               default=100_000_000, type=int, metavar="N", environment="FSDP_MIN_NUM_PARAMS"),
        Option("--fsdp_sharding_strategy", "Version 1, old spelling: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, ...",
               default="FULL_SHARD", metavar="STRATEGY", environment="FSDP_SHARDING_STRATEGY"),
        Option("--fsdp_reshard_after_forward",
               "Version 2: free gathered parameters after the forward pass, true or false. "
               "Version 1: a sharding strategy.",
               default="true", metavar="CHOICE", environment="FSDP_RESHARD_AFTER_FORWARD", spelled=lower),
        Option("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP.", metavar="POLICY",
               environment="FSDP_AUTO_WRAP_POLICY"),
        Option("--fsdp_transformer_layer_cls_to_wrap", "Class names to wrap, separated by commas.", metavar="CLASSES",
               environment="FSDP_TRANSFORMER_CLS_TO_WRAP"),
        Option("--fsdp_backward_prefetch_policy --fsdp_backward_prefetch",
               "Version 1: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH.", dest="fsdp_backward_prefetch",
               metavar="POLICY", environment="FSDP_BACKWARD_PREFETCH"),
        Option("--fsdp_state_dict_type", "FULL_STATE_DICT, SHARDED_STATE_DICT or (version 1) LOCAL_STATE_DICT.",
               metavar="TYPE", environment="FSDP_STATE_DICT_TYPE"),
        Option("--fsdp_forward_prefetch", "Version 1: gather the next block during the forward pass: true or false.",
               default="false", metavar="BOOL", environment="FSDP_FORWARD_PREFETCH", spelled=lower),
        Option("--fsdp_use_orig_params", "Version 1: let the optimizer see the original parameters: true or false.",
               default="true", metavar="BOOL", environment="FSDP_USE_ORIG_PARAMS", spelled=lower),
        Option("--fsdp_cpu_ram_efficient_loading", "Load weights on the first process only: true or false.",
               default="true", metavar="BOOL", environment="FSDP_CPU_RAM_EFFICIENT_LOADING", spelled=lower),
        Option("--fsdp_sync_module_states", "Version 1: send the first process's weights to all: true or false.",
               default="true", metavar="BOOL", environment="FSDP_SYNC_MODULE_STATES", spelled=lower),
        Option("--fsdp_activation_checkpointing", "Compute activations again in the backward pass: true or false.",
               default="false", metavar="BOOL", environment="FSDP_ACTIVATION_CHECKPOINTING", spelled=lower),
        Option("--fsdp_activation_checkpointing_offload", "Keep the remaining activations on the CPU: true or false.",
               default="false", metavar="BOOL", environment="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", spelled=lower),
        Option("", "Modules to leave alone: names or a pattern.", dest="fsdp_ignored_modules",
               environment="FSDP_IGNORED_MODULES"),
    ),
    shown_with="--use_fsdp",
    handed_when=lambda settings: settings.use_fsdp,
    announced_by="ACCELERATE_USE_FSDP",
)  # fmt: skip
