"""The command `accelerate merge-weights`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from accel_cli.arguments import CommandParser, Flag, add_options, command_parser, switch
from accel_cli.errors import UsageError, without_traceback

HELP = "Merge the weights of a sharded checkpoint."

# its name is public interface of 1.15; the text is ours
description = (
    "Merge the weights that FSDP saved in shards (`SHARDED_STATE_DICT`) into a model folder that loads anywhere. "
    "Tensors are read and written one by one, so that little memory is needed."
)

OPTIONS = (
    Flag("checkpoint_directory", "Folder with the sharded weights, or a checkpoint that contains one."),
    Flag("output_path", "Folder for the merged weights."),
    switch("--unsafe_serialization", "Write pytorch_model.bin, a pickle file, instead of safetensors."),
    switch("--remove_checkpoint_dir", "Remove the sharded weights after the merged ones are written to disk."),
)


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate merge-weights`."""
    parser.description = description
    add_options(parser, OPTIONS)


def merge_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate merge-weights`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned, or None for a separate parser.
    """
    return command_parser(subparsers, "merge-weights", HELP, add_arguments, merge_command)


def merge_command(args: Namespace) -> None:
    """Merge sharded weights.

    Args:
        args: The parsed arguments of `merge_command_parser`.

    Raises:
        ValueError: The checkpoint cannot be merged, or the result cannot be written.
    """
    from accel_integrations.training_state.merge import merge_fsdp_weights

    with without_traceback():
        try:
            merge_fsdp_weights(
                args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
            )
        except TypeError as error:
            raise UsageError(str(error)) from error
    print(f"Merged weights written to {args.output_path}")


def run(args: Namespace) -> None:
    """Run `accelerate merge-weights`."""
    merge_command(args)
