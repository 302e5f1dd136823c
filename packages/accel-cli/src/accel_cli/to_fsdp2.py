"""The command `accelerate to-fsdp2`: converts a config file from FSDP 1 to FSDP 2."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from accel_cli.arguments import CommandParser, Flag, add_options, command_parser, switch
from accel_cli.errors import ExistingFileError, MissingFileError, UsageError, without_traceback
from accel_cli.launch.flags.table import is_option
from accel_state.public_names import known_as

if TYPE_CHECKING:
    from accel_cli.configfile.source import Source

HELP = "Convert a config file from FSDP 1 to FSDP 2."

OPTIONS = (
    Flag("--config_file", "Config file to convert.", metavar="FILE", required=True),
    switch("--overwrite", "Replace the output file if there is one; without --output_file, the config file."),
    Flag("--output_file", "File to write.", metavar="FILE"),
)


@known_as("accelerate.commands.to_fsdp2.ConversionStatus")
class ConversionStatus(Enum):
    """Why a setting of version 1 has no counterpart."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


# option of version 1 -> that of version 2, or why there is none
ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy": "fsdp_auto_wrap_policy",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_cpu_ram_efficient_loading": "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params": "fsdp_offload_params",
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_state_dict_type": "fsdp_state_dict_type",
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "fsdp_min_num_params",
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
    "fsdp_activation_checkpointing": "fsdp_activation_checkpointing",
}

# whether gathered parameters are freed after the forward pass
FREES_PARAMETERS = {
    "FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False, "NO_SHARD": False,
}  # fmt: skip

ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {
    "fsdp_sharding_strategy": FREES_PARAMETERS,
    "fsdp_reshard_after_forward": FREES_PARAMETERS,
}

REPLICAS = "FSDP 2 shards over all ranks; for replicas set parallelism_config_dp_replicate_size"
REMARKS = {
    ConversionStatus.REMOVED: "FSDP 2 does not need it",
    ConversionStatus.NOT_YET_IMPLEMENTED: "FSDP 2 does not support it yet",
    "HYBRID_SHARD": REPLICAS,
    "HYBRID_SHARD_ZERO2": REPLICAS,
    "NO_SHARD": "FSDP 2 always shards; plain data parallelism (MULTI_GPU) does not",
    "LOCAL_STATE_DICT": "FSDP 2 has no local state dicts",
}
NO_LOCAL_STATE_DICT = {"fsdp_state_dict_type": {"LOCAL_STATE_DICT": "SHARDED_STATE_DICT"}}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The conversion of one option.

    Attributes:
        old: Its name in version 1; empty for one that was added.
        before: Its value there.
        new: Its name in version 2; empty where it was dropped.
        after: Its value there.
        remark: A note for the user; may be empty.
    """

    old: str
    before: Any
    new: str
    after: Any
    remark: str = ""

    @property
    def what(self) -> str:
        """What happened, in one word."""
        if not self.new:
            return "dropped"
        if not self.old:
            return "added"
        if self.old != self.new:
            return "renamed"
        return "kept" if self.before == self.after else "changed"


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate to-fsdp2`."""
    add_options(parser, OPTIONS)


def to_fsdp2_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate to-fsdp2`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` gave, or None for a parser of its own.
    """
    return command_parser(subparsers, "to-fsdp2", HELP, add_arguments, to_fsdp2_command)


def to_fsdp2_command(args: Namespace, load: Callable[[str], dict[str, Any]] | None = None) -> None:
    """Convert a config file, and print the conversion of each FSDP option.

    A file that is for FSDP 2 already is copied unchanged, with a logged warning.

    Args:
        args: The parsed arguments of `to_fsdp2_command_parser`.
        load: Reads the config file; `load_config` when None.

    Raises:
        ValueError: The file is not for FSDP, or no output is named.
        FileNotFoundError: There is no such file.
        FileExistsError: The output exists and may not be replaced.
    """
    from accel_cli.configfile.write import check_target

    with without_traceback():
        target = _target(args)
    check_target(target)
    config = (load or load_config)(args.config_file)
    source = _source(args.config_file)
    if _version(config) == "2":
        _keep(config, source, target)
        return
    _check(config, source)
    converted, outcomes, others = convert(config)
    _write(target, converted)
    print(report(outcomes))
    for line in others:
        print(line)
    for outcome in outcomes:
        if outcome.remark:
            print(f"accelerate to-fsdp2: {outcome.what} {outcome.old}: {outcome.remark}.", file=sys.stderr)
    print(f"\nSettings for FSDP 2 written to {target}")


def run(args: Namespace) -> None:
    """Run `accelerate to-fsdp2`."""
    to_fsdp2_command(args)


def load_config(config_file: str) -> dict[str, Any]:
    """Read a config file without checking it.

    Args:
        config_file: YAML, or JSON where the name ends in `.json`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read.
    """
    from accel_cli.configfile.values import read_values

    with without_traceback():
        return read_values(config_file)[0]


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Convert the content of a config file.

    Args:
        config: The content of a config file; it is not changed. One that is not for FSDP 1 is returned unchanged.

    Returns:
        The content for FSDP 2.

    Example:
        ```python
        config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}
        convert_config_to_fsdp2(config)["fsdp_config"]  # {"fsdp_reshard_after_forward": False, "fsdp_version": 2}
        ```
    """
    if not config.get("fsdp_config") or _version(config) == "2":
        return config
    return convert(config)[0]


def convert(config: dict[str, Any]) -> tuple[dict[str, Any], list[Outcome], list[str]]:
    """Convert the content of a config file for FSDP 1, of this or an older version.

    Args:
        config: The content of the file; it is not changed.

    Returns:
        The content for FSDP 2, the conversion of each FSDP option, and one line for each other key that was updated.
    """
    from accel_cli.configfile.migrate import migrate

    values, done = migrate(config)
    before = values.get("fsdp_config") or {}
    outcomes = list(_outcomes(before))
    values["fsdp_config"] = {outcome.new: outcome.after for outcome in outcomes if outcome.new}
    return values, outcomes, [str(item) for item in done]


def report(outcomes: list[Outcome]) -> str:
    """Make a table of the conversion of each option."""
    rows = [("setting", "was", "", "setting", "is")]
    rows += [(row.old, _spelled(row.before), row.what, row.new, _spelled(row.after)) for row in outcomes]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.insert(1, "-" * (sum(widths) + 8))
    return "\n".join(lines)


def _outcomes(section: dict[str, Any]) -> Iterator[Outcome]:
    """Yield the conversion of each option of version 1, and the new version."""
    for key, value in section.items():
        if key == "fsdp_version":
            continue
        new = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(new, ConversionStatus):
            yield Outcome(key, value, "", None, REMARKS[new])
        elif key == "fsdp_reshard_after_forward" and "fsdp_sharding_strategy" in section:
            yield Outcome(key, value, "", None, "FSDP 1 reads fsdp_sharding_strategy")
        else:
            yield Outcome(key, value, new, _value(key, value), _remark(key, value))
    version = section.get("fsdp_version")
    yield Outcome("" if version is None else "fsdp_version", version, "fsdp_version", 2)


def _value(key: str, value: Any) -> Any:
    """Convert a value to version 2."""
    words: dict[str, Any] = ARGUMENT_VALUE_MAPPING.get(key) or NO_LOCAL_STATE_DICT.get(key) or {}
    return words.get(str(value).upper(), value)


def _remark(key: str, value: Any) -> str:
    if not is_option(key):
        return "it is not an option of FSDP and has no effect"
    return REMARKS.get(str(value).upper(), "") if _value(key, value) != value else ""


def _spelled(value: Any) -> str:
    """Spell a value as the file does."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _version(config: dict[str, Any]) -> str:
    section = config.get("fsdp_config") or {}
    return str(section.get("fsdp_version", section.get("version", 1)))


def _target(args: Namespace) -> str:
    """The file to write, after checking that it may be written."""
    from pathlib import Path

    if not Path(args.config_file).expanduser().exists():
        raise MissingFileError(f"Config file {args.config_file!r} does not exist.")
    if not args.output_file and not args.overwrite:
        raise UsageError("No output file is named. Give --output_file, or --overwrite to replace the config file.")
    target = os.path.expanduser(args.output_file or args.config_file)
    if not args.overwrite and (Path(target).exists() or Path(target).is_symlink()):
        raise ExistingFileError(f"The output file {target!r} already exists. Name another, or give --overwrite.")
    return target


def _write(target: str, values: dict[str, Any]) -> None:
    """Write settings; missing folders are created."""
    from accel_cli.configfile.values import write_json, write_yaml

    with without_traceback():
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        (write_json if target.endswith(".json") else write_yaml)(target, values)


def _keep(values: dict[str, Any], source: Source, target: str) -> None:
    """Copy settings for version 2, unless source and target are one file. A script that converts many files continues."""
    import logging

    where = source.at("fsdp_config.fsdp_version", "fsdp_config.version")
    logging.getLogger("accelerate.commands.to_fsdp2").warning(
        "%s: fsdp_version is 2 already. Nothing was converted.", where
    )
    if not (os.path.exists(target) and os.path.samefile(source.path, target)):
        _write(target, values)


def _source(path: str) -> Source:
    """Read the text of a config file, for the line numbers in messages."""
    from accel_cli.configfile.source import read_source

    with without_traceback():
        return read_source(os.path.expanduser(path))


def _check(values: dict[str, Any], source: Source) -> None:
    """Check that a file is valid and for FSDP."""
    from accel_cli.configfile.read import config_class

    with without_traceback():
        config_class(values).from_values(values, source)
    kind = str(values.get("distributed_type")).upper()
    if kind != "FSDP" and not values.get("fsdp_config"):
        raise UsageError(f"{source} is not for FSDP: its distributed_type is {kind!r}.")
