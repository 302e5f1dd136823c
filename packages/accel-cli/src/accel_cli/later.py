"""Commands whose options are settled but which this release cannot run yet."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NoReturn

from accel_cli.arguments import CommandParser, Option, make_parser, switch
from accel_cli.errors import NotInThisReleaseError

NOTICE = "(not in this release)"

SETTINGS_FILE = Option("--config_file", "Settings file to use instead of the default one.", metavar="FILE")

OPTIONS: dict[str, tuple[Option, ...]] = {
    "estimate-memory": (
        Option("model_name", "Name of a model on the Hugging Face Hub."),
        Option("--library_name", "Library of the model.", choices=("timm", "transformers")),
        Option("--dtypes", "Number formats to estimate for.", nargs="+", metavar="DTYPE",
               default=("float32", "float16", "int8", "int4"), choices=("float32", "float16", "int8", "int4")),
        switch("--trust_remote_code", "Run code that comes with the model."),
    ),
    "merge-weights": (
        Option("checkpoint_directory", "Folder with the sharded weights."),
        Option("output_path", "Folder for the merged weights."),
        switch("--unsafe_serialization", "Write a pickle file instead of safetensors."),
        switch("--remove_checkpoint_dir", "Remove the sharded weights afterwards."),
    ),
    "tpu-config": (
        SETTINGS_FILE,
        Option("--tpu_name", "Name of the TPU.", metavar="NAME"),
        Option("--tpu_zone", "Zone of the TPU.", metavar="ZONE"),
        switch("--use_alpha", "Use the alpha version of gcloud."),
        Option("--command_file", "File with the commands to run.", metavar="FILE"),
        Option("--command", "A command to run; may be given several times.", action="append", nargs="+"),
        switch("--install_accelerate", "Install accelerate first."),
        Option("--accelerate_version", "Version to install.", default="latest", metavar="VERSION"),
        switch("--debug", "Print the command instead of running it."),
    ),
    "test": (SETTINGS_FILE,),
    "to-fsdp2": (
        Option("--config_file", "Settings file to convert.", metavar="FILE", required=True),
        switch("--overwrite", "Write over the file."),
        Option("--output_file", "File to write.", metavar="FILE"),
    ),
}  # fmt: skip

HELP = {
    "estimate-memory": f"Estimate the memory that a model needs {NOTICE}.",
    "merge-weights": f"Merge the weights of a sharded checkpoint {NOTICE}.",
    "tpu-config": f"Run commands on a TPU pod {NOTICE}.",
    "test": f"Check that launching works on this machine {NOTICE}.",
    "to-fsdp2": f"Convert a settings file to FSDP 2 {NOTICE}.",
}


def later_command_parser(command: str, subparsers: Any = None) -> CommandParser:
    """Build the parser of a command that cannot run yet."""
    parser = make_parser(subparsers, command, HELP[command], OPTIONS[command])
    parser.set_defaults(later=command)
    if subparsers is not None:
        parser.set_defaults(func=refuse)
    return parser


def estimate_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate estimate-memory`."""
    return later_command_parser("estimate-memory", subparsers)


def merge_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate merge-weights`."""
    return later_command_parser("merge-weights", subparsers)


def tpu_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate tpu-config`."""
    return later_command_parser("tpu-config", subparsers)


def test_command_parser(subparsers: Any = None) -> CommandParser:  # noqa: PT028 - not a test
    """Build the parser of `accelerate test`."""
    return later_command_parser("test", subparsers)


def to_fsdp2_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate to-fsdp2`."""
    return later_command_parser("to-fsdp2", subparsers)


def refuse(args: Namespace) -> NoReturn:
    """Say that the command is not there yet.

    Raises:
        ValueError: Always.
    """
    raise NotInThisReleaseError(f"`accelerate {args.later}` is not part of this release yet.")
