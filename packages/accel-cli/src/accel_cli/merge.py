"""The command `accelerate merge-weights`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from accel_cli.arguments import CommandParser, Option, add_options, command_parser, switch
from accel_cli.errors import UsageError, without_traceback

HELP = "Merge the weights of a sharded checkpoint."

# the name and the value are interface; the words are ours
description = (
    "Merge the weights that FSDP saved in shards (`SHARDED_STATE_DICT`) into a model folder that loads anywhere. "
    "Tensors are read and written one by one, so that little memory is needed."
)

OPTIONS = (
    Option("checkpoint_directory", "Folder with the sharded weights, or a checkpoint that holds one."),
    Option("output_path", "Folder for the merged weights."),
    switch("--unsafe_serialization", "Write pytorch_model.bin, a pickle file, instead of safetensors."),
    switch("--remove_checkpoint_dir", "Remove the sharded weights once the merged ones are on the disk."),
)


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate merge-weights`."""
    parser.description = description
    add_options(parser, OPTIONS)


def merge_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate merge-weights`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` gave, or None for a parser of its own.
    """
    return command_parser(subparsers, "merge-weights", HELP, add_arguments, merge_command)


def merge_command(args: Namespace) -> None:
    """Merge sharded weights.

    Args:
        args: What the parser of `merge_command_parser` gave.

    Raises:
        ValueError: The checkpoint cannot be merged, or the result not be written.
    """
    from accel_integrations.checkpoints.merge import merge_fsdp_weights

    with without_traceback():
        try:
            merge_fsdp_weights(
                args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
            )
        except TypeError as error:
            raise UsageError(str(error)) from error
    print(f"Merged weights written to {args.output_path}")


def run(args: Namespace) -> None:
    """Carry out `accelerate merge-weights`."""
    merge_command(args)
