"""All options of `accelerate launch`, in the order of `--help`."""

from __future__ import annotations

from typing import Any

from accel_cli.arguments import CommandParser, Option, add_options
from accel_cli.launch.flags.deepspeed import DEEPSPEED
from accel_cli.launch.flags.fp8 import FP8
from accel_cli.launch.flags.fsdp import FSDP
from accel_cli.launch.flags.general import (
    AWS,
    COMMAND,
    HARDWARE,
    MPI,
    PARADIGM,
    PROCESSES,
    RESOURCES,
    RETIRED,
    SCRIPT,
    TPU,
)
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.flags.megatron import MEGATRON_LM
from accel_cli.launch.flags.parallelism import CONTEXT, PARALLELISM, PIPELINE, SEQUENCE

GROUPS: tuple[OptionGroup, ...] = (
    COMMAND, HARDWARE, RESOURCES, PARADIGM, PROCESSES, TPU, DEEPSPEED, FSDP, MEGATRON_LM, FP8, PARALLELISM, CONTEXT,
    SEQUENCE, PIPELINE, AWS, MPI, RETIRED, SCRIPT,
)  # fmt: skip

# where two flags set one value, the first one knows its default
OPTIONS: dict[str, Option] = {option.name: option for group in reversed(GROUPS) for option in reversed(group.options)}

SHOWN_WITH = {group.title: group.shown_with for group in GROUPS if group.shown_with}


def add_launch_options(parser: CommandParser) -> None:
    """Add every option to a parser, under its heading."""
    headings: dict[str, Any] = {"": parser}
    for group in GROUPS:
        if group.title not in headings:
            headings[group.title] = parser.add_argument_group(group.title)
        add_options(headings[group.title], group.options)
