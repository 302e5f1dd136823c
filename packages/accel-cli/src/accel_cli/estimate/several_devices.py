"""The memory of one of several devices: `training_script` is rehearsed, by the flags of `accelerate launch`."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from accel_cli.errors import UsageError

if TYPE_CHECKING:
    from accel_cli.rehearse.devices import Device
    from accel_cli.rehearse.result import Result

PARALLEL: dict[str, str] = {
    "ddp": "",
    "zero1": "--use_deepspeed --zero_stage 1",
    "zero2": "--use_deepspeed --zero_stage 2",
    "zero3": "--use_deepspeed --zero_stage 3",
    "fsdp": "--use_fsdp --fsdp_version 2 {wrap}",
    "tp": "--use_parallelism_config --parallelism_config_tp_size {num_devices}",
}
"""`--parallel` -> flags of `accelerate launch`."""

WRAP = {
    "transformers": "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP",
    "timm": "--fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 1000000",
}
"""Library -> the units that FSDP shards."""

OF_THE_MODEL = (
    "library_name",
    "optimizer",
    "batch_size",
    "sequence_length",
    "trust_remote_code",
    "gradient_checkpointing",
)


def rehearse_training(library: str | None, args: Namespace) -> tuple[Result, Device]:
    """Rehearse training steps of a model as one rank.

    Args:
        library: Of the model.
        args: The command line of `accelerate estimate-memory`.

    Returns:
        The result, and the device of each rank.

    Raises:
        UsageError: What the model's forward takes is not known, or it cannot be rehearsed.
    """
    if library not in WRAP:
        raise UsageError(
            f"--parallel {args.parallel} takes training steps, and what the forward of {args.model_name!r} takes is not known. "
            "Rehearse a training script of yours: accelerate rehearse train.py."
        )
    from accel_cli.launch.unconfigured import unconfigured
    from accel_cli.rehearse.cluster import RehearsalFailedError, rehearse, settle
    from accel_cli.rehearse.command import REHEARSE, rehearse_command_parser, rehearsed_device

    flags = PARALLEL[args.parallel].format(num_devices=args.num_devices, wrap=WRAP[library])
    with unconfigured() as (config_file, environ):
        words = ["--config_file", config_file, "--device", args.device, "--num_processes", str(args.num_devices)]
        words += ["--mixed_precision", args.mixed_precision, *flags.split()]
        words += ["--module", "accel_cli.estimate.training_script", args.model_name, *_words_of_the_model(args)]
        rehearsal = rehearse_command_parser().parse_args(words)
        device = rehearsed_device(rehearsal)
        try:
            return rehearse(settle(rehearsal, REHEARSE, environ), rehearsal, environ, is_quiet=True), device
        except RehearsalFailedError as failure:
            raise UsageError(f"--parallel {args.parallel}: {failure}") from failure


def _words_of_the_model(args: Namespace) -> list[str]:
    words = []
    for name in OF_THE_MODEL:
        value = getattr(args, name)
        if value not in (None, False):
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words
