"""The command `accelerate rehearse`."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from accel_cli.arguments import CommandParser, Flag, add_options, command_parser, switch
from accel_cli.errors import UsageError
from accel_cli.launch.flags.table import SHOWN_WITH, add_launch_options
from accel_state.settings.option import INTEGER, NUMBER

if TYPE_CHECKING:
    from accel_cli.rehearse.devices import Device

OLDEST_TORCH = "2.11"
HELP = "Run a script on a cluster that is not there: memory, communication and time."

REHEARSE = (
    Flag("--device", "Device of each rank: a name of the table in docs/rehearse.md, such as h100; cpu for none.", default="h100",
           metavar="NAME"),
    Flag("--rank", "The rank that is rehearsed: under pipeline parallelism, ranks hold different stages.", default=0, kind=INTEGER,
           metavar="N"),
    Flag("--steps", "Optimizer steps to take; the last one is shown.", default=3, kind=INTEGER, metavar="N"),
    Flag("--intra_gbps", "Gigabytes per second that a device sends to others of its machine; that of the device's data sheet if left "
           "out.", kind=NUMBER, metavar="G"),
    Flag("--inter_gbps", "Gigabytes per second that a device sends to other machines.", kind=NUMBER, metavar="G"),
    switch("--find_batch_size", "Look for the largest batch of a rank that fits the device."),
    switch("--fake_data", "Read the first batch only; all others have its shapes."),
    switch("--values", "Use real tensors, which need this machine's memory, for scripts that need values."),
    switch("--sweep", "Rehearse changes of the settings, too, and rank them."),
    Flag("--html", "Write a page with the memory over time to this file.", metavar="FILE"),
    switch("--json", "Print JSON, with bytes and seconds."),
)  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate rehearse`."""
    parser.allow_abbrev = False
    parser.shown_with |= SHOWN_WITH
    parser.usage = "accelerate rehearse [options] [options of accelerate launch] script [arguments of the script]"
    add_options(parser.add_argument_group("rehearsal"), REHEARSE)
    add_launch_options(parser)


def rehearse_command_parser() -> CommandParser:
    """Build the parser of `accelerate rehearse`."""
    return command_parser(None, "rehearse", HELP, add_arguments, run)


def run(args: Namespace) -> int:
    """Rehearse a script, and print what it needs.

    Args:
        args: The parsed arguments.

    Returns:
        The exit status for the shell: that of the script, if it fails.

    Raises:
        ValueError: The command line, the config file or the environment is not valid, or the settings cannot be rehearsed.
    """
    from accel_cli.rehearse.cluster import RehearsalFailedError, rehearse, settle
    from accel_cli.rehearse.report import as_json, as_text

    device = rehearsed_device(args)
    settings = settle(args, REHEARSE)
    if not settings.quiet:
        for note in settings.notes:
            print(f"accelerate rehearse: {note}", file=sys.stderr)
    try:
        result = rehearse(settings, args)
        rows = []
        if args.sweep:
            from accel_cli.rehearse.sweep import sweep

            rows = sweep(args, REHEARSE, device, result)
    except RehearsalFailedError as failure:
        return failure.status
    if args.html:
        from accel_cli.rehearse.report import write_page

        write_page(args.html, args.training_script, result, device, rows)
    print(as_json(result, device, rows) if args.json else as_text(args.training_script, result, device, rows))
    return 0


def _check_libraries() -> None:
    """Reject a lack of the umbrella, with which scripts train, and a torch whose collectives need values, as 2.9 and 2.10."""
    from importlib.metadata import version
    from importlib.util import find_spec

    from accel_state.libraries import is_torch_version

    if find_spec("accelerate") is None:
        raise UsageError("Rehearsals need the package accelerate, which is not installed. Run: pip install accelerate")
    if not is_torch_version(">=", OLDEST_TORCH):
        raise UsageError(
            f"Rehearsals need torch {OLDEST_TORCH} or newer, and this is torch {version('torch')}, whose collectives cannot run "
            "without values. Install a newer torch, or use accelerate estimate-memory --training."
        )


def rehearsed_device(args: Namespace) -> Device:
    """The row of `--device`, with the bandwidths that were given.

    Args:
        args: The parsed arguments, in which the device gets its full name.

    Raises:
        UsageError: A value is not valid, or this torch cannot rehearse.
    """
    from dataclasses import replace

    from accel_cli.rehearse.devices import device_named

    _check_libraries()
    device = device_named(args.device)
    args.device = device.name
    if args.steps < 2:
        raise UsageError(f"--steps must be at least 2, got {args.steps}: the first step has no optimizer state yet.")
    for name in ("intra_gbps", "inter_gbps"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name} must be above 0, got {value:g}.")
        if value is not None:
            device = replace(device, **{name: value})
    if args.find_batch_size and not device.memory_bytes:
        raise UsageError(
            f"--find_batch_size needs a device with a memory of its own, and --device is {device.name!r}."
        )
    return device
