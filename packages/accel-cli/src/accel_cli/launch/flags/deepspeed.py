"""Options of DeepSpeed."""

from __future__ import annotations

from accel_cli.arguments import Option
from accel_cli.launch.flags.group import OptionGroup

DEEPSPEED = OptionGroup(
    "DeepSpeed Arguments",
    (
        Option("--deepspeed_config_file", "DeepSpeed's own JSON file.", metavar="FILE"),
        Option("--zero_stage", "What to shard: 1 optimizer states, 2 gradients too, 3 parameters too.", type=int,
               metavar="STAGE"),
        Option("--offload_optimizer_device", "Where optimizer states are kept: none, cpu or nvme.", metavar="PLACE"),
        Option("--offload_param_device", "Where parameters are kept: none, cpu or nvme.", metavar="PLACE"),
        Option("--offload_optimizer_nvme_path", "Folder for optimizer states.", metavar="FOLDER"),
        Option("--offload_param_nvme_path", "Folder for parameters.", metavar="FOLDER"),
        Option("--gradient_accumulation_steps", "Batches per optimizer step.", type=int, metavar="N"),
        Option("--gradient_clipping", "Largest norm of the gradient.", type=float, metavar="NORM"),
        Option("--zero3_init_flag", "Shard the model while it is built (stage 3): true or false.", metavar="BOOL"),
        Option("--zero3_save_16bit_model", "Save 16-bit weights (stage 3): true or false.", metavar="BOOL"),
        Option("--deepspeed_hostfile", "List of machines.", metavar="FILE"),
        Option("--deepspeed_exclusion_filter", "Machines or GPUs to leave out.", metavar="FILTER"),
        Option("--deepspeed_inclusion_filter", "Machines or GPUs to use.", metavar="FILTER"),
        Option("--deepspeed_multinode_launcher", "How to start on several machines.", metavar="LAUNCHER"),
        Option("--deepspeed_moe_layer_cls_names", "Mixture-of-experts classes, separated by commas.",
               metavar="CLASSES"),
    ),
    shown_with="--use_deepspeed",
    handed_when=lambda settings: settings.use_deepspeed,
)  # fmt: skip
