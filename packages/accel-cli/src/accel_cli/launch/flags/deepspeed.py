"""Options of DeepSpeed."""

from __future__ import annotations

from typing import Any

from accel_cli.arguments import Option, lower
from accel_cli.launch.flags.group import OptionGroup

AUTO = "auto"


def count_or_auto(text: str) -> int | str:
    """Read a whole number, or the word `auto`."""
    return AUTO if text.lower() == AUTO else int(text)


def number_or_auto(text: str) -> float | str:
    """Read a number, or the word `auto`."""
    return AUTO if text.lower() == AUTO else float(text)


count_or_auto.__name__, number_or_auto.__name__ = "int", "float"  # argparse puts these words into its error messages


def _row(name: str, help: str, variable: str, **rest: Any) -> Option:
    """Row of an option that the script hears of, in lower case."""
    return Option(f"--{name}", help, environment=f"ACCELERATE_{variable}", spelled=lower, **rest)


def _text(name: str, help: str, variable: str, **rest: Any) -> Option:
    """Row of an option that the script hears of as it was written: names of folders and classes."""
    return Option(f"--{name}", help, environment=f"ACCELERATE_{variable}", **rest)


DEEPSPEED = OptionGroup(
    "DeepSpeed Arguments",
    (
        _text("deepspeed_config_file", "DeepSpeed's own JSON file.", "DEEPSPEED_CONFIG_FILE", metavar="FILE"),
        _row("zero_stage", "What to shard: 1 optimizer states, 2 gradients too, 3 parameters too.",
             "DEEPSPEED_ZERO_STAGE", type=int, metavar="STAGE"),
        _row("offload_optimizer_device", "Where optimizer states are kept: none, cpu or nvme.",
             "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", metavar="PLACE"),
        _row("offload_param_device", "Where parameters are kept: none, cpu or nvme.",
             "DEEPSPEED_OFFLOAD_PARAM_DEVICE", metavar="PLACE"),
        _text("offload_optimizer_nvme_path", "Folder for optimizer states.",
              "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", metavar="FOLDER"),
        _text("offload_param_nvme_path", "Folder for parameters.", "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
              metavar="FOLDER"),
        _row("gradient_accumulation_steps", "Batches per optimizer step, or auto.", "GRADIENT_ACCUMULATION_STEPS",
             type=count_or_auto, metavar="N"),
        _row("gradient_clipping", "Largest norm of the gradient, or auto.", "GRADIENT_CLIPPING", type=number_or_auto,
             metavar="NORM"),
        _row("zero3_init_flag", "Shard the model while it is built (stage 3): true or false.", "DEEPSPEED_ZERO3_INIT",
             metavar="BOOL"),
        _row("zero3_save_16bit_model", "Save 16-bit weights (stage 3): true or false.",
             "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", metavar="BOOL"),
        Option("--deepspeed_hostfile", "List of machines.", metavar="FILE"),
        Option("--deepspeed_exclusion_filter", "Machines or GPUs to leave out.", metavar="FILTER"),
        Option("--deepspeed_inclusion_filter", "Machines or GPUs to use.", metavar="FILTER"),
        Option("--deepspeed_multinode_launcher",
               "How to start on several machines: pdsh, standard (this command on each of them), openmpi, mvapich, "
               "mpich, slurm or nossh.", metavar="LAUNCHER"),
        _text("deepspeed_moe_layer_cls_names", "Mixture-of-experts classes, separated by commas.",
              "DEEPSPEED_MOE_LAYER_CLS_NAMES", metavar="CLASSES"),
    ),
    shown_with="--use_deepspeed",
    handed_when=lambda settings: settings.use_deepspeed,
    announced_by="ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip
