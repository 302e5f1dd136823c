"""All options of `accelerate launch`, in the order of `--help`.

An option is declared once: as a field of `LaunchSettings` if the launcher itself uses it, or as a field of a settings
class if the launcher only passes its value to the processes. These classes are imported when one of their options is
used, so that `accelerate launch --help` and launches without them stay fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

from accel_cli.arguments import HELP_ALL, CommandParser, Flag, add_options
from accel_cli.extensions import OPTIONS_GROUP, entry_points
from accel_cli.launch import settings as own
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.settings import LaunchSettings, rows_under

PARALLELISM_TITLE = "ParallelismConfig Arguments"


def _in_fp8(settings: LaunchSettings) -> bool:
    return str(settings.mixed_precision).lower() == "fp8"


def _size_is_above_one(axis: str) -> Callable[[LaunchSettings], bool]:
    """Whether `--use_parallelism_config` is given and a mesh dimension has a size above 1."""
    name = f"parallelism_config_{axis}_size"
    return lambda settings: settings.use_parallelism_config and (value_of(settings, name) or 1) > 1


def _handler(axis: str, settings: str) -> OptionGroup:
    """The options of one mesh dimension."""
    return OptionGroup.from_settings(
        settings,
        PARALLELISM_TITLE,
        shown_with="--use_parallelism_config",
        passed_when=_size_is_above_one(axis),
        requires=f"--use_parallelism_config and --parallelism_config_{axis}_size",
        section="parallelism_config",
        prefix="parallelism_config_",
    )


_fp8 = partial(
    OptionGroup.from_settings, title="FP8 Arguments", shown_with="--fp8_backend", passed_when=_in_fp8,
    requires="--mixed_precision fp8", section="fp8_config", prefix="fp8_",
)  # fmt: skip

DYNAMO = OptionGroup.from_settings(
    "accel_state.settings.compile:TorchDynamoPlugin", own.RESOURCES, section="dynamo_config", prefix="dynamo_"
)
FSDP = OptionGroup.from_settings(
    "accel_state.settings.fsdp:FullyShardedDataParallelPlugin",
    "FSDP Arguments",
    shown_with="--use_fsdp",
    passed_when=lambda settings: settings.use_fsdp,
    enabled_by="ACCELERATE_USE_FSDP",
    section="fsdp_config",
    prefix="fsdp_",
)
DEEPSPEED = OptionGroup.from_settings(
    "accel_state.settings.deepspeed:DeepSpeedPlugin",
    own.DEEPSPEED,
    own=tuple(rows_under(own.DEEPSPEED)),
    shown_with="--use_deepspeed",
    passed_when=lambda settings: settings.use_deepspeed,
    enabled_by="ACCELERATE_USE_DEEPSPEED",
    section="deepspeed_config",
)
MEGATRON_LM = OptionGroup.from_settings(
    "accel_state.settings.megatron:MegatronLMPlugin",
    "Megatron-LM Arguments",
    shown_with="--use_megatron_lm",
    passed_when=lambda settings: settings.use_megatron_lm,
    enabled_by="ACCELERATE_USE_MEGATRON_LM",
    section="megatron_lm_config",
    prefix="megatron_lm_",
)
FP8 = (
    OptionGroup(
        own.FP8, tuple(rows_under(own.FP8)), shown_with="--fp8_backend", passed_when=_in_fp8,
        requires="--mixed_precision fp8", section="fp8_config", prefix="fp8_",
    ),
    _fp8("accel_state.settings.fp8:TERecipeKwargs"),
    _fp8("accel_state.settings.fp8:MSAMPRecipeKwargs"),
    _fp8("accel_state.settings.fp8:AORecipeKwargs"),
)  # fmt: skip
PARALLELISM = (
    OptionGroup.from_settings(
        "accel_state.mesh:ParallelismConfig",
        PARALLELISM_TITLE,
        # Older versions of the library in the processes do not have "pp", and expect the name of the backend.
        launch_defaults={"pp_size": None, "sp_backend": "deepspeed"},
        shown_with="--use_parallelism_config",
        passed_when=lambda settings: settings.use_parallelism_config,
        enabled_by="ACCELERATE_USE_PARALLELISM_CONFIG",
        section="parallelism_config",
        prefix="parallelism_config_",
    ),
    _handler("cp", "accel_state.settings.parallelism:TorchContextParallelConfig"),
    _handler("sp", "accel_state.settings.parallelism:DeepSpeedSequenceParallelConfig"),
    _handler("pp", "accel_state.settings.parallelism:PipelineParallelConfig"),
)
TPU = OptionGroup(own.TPU, tuple(rows_under(own.TPU)), shown_with="--tpu", passed_when=lambda settings: settings.tpu)
MPI = OptionGroup(
    own.MPI,
    tuple(rows_under(own.MPI)),
    shown_with="--mpirun_hostfile",
    requires="--cpu",
    passed_when=lambda settings: settings.use_cpu and bool(settings.mpirun_hostfile),
    section="mpirun_config",
    prefix="mpirun_",
)


def _plain(heading: str, **more: Any) -> OptionGroup:
    """The launcher's own options under a heading."""
    title = "" if heading in (own.RETIRED, own.SCRIPT) else heading
    return OptionGroup(title, tuple(rows_under(heading)), **more)


RESOURCES = (_plain(own.RESOURCES), DYNAMO)
GROUPS: tuple[OptionGroup, ...] = (
    _plain(own.COMMAND), _plain(own.HARDWARE), *RESOURCES, _plain(own.PARADIGM),
    _plain(own.PROCESSES, shown_with="--multi_gpu"), TPU, DEEPSPEED, FSDP, MEGATRON_LM, *FP8, *PARALLELISM,
    _plain(own.AWS, shown_with="--aws_access_key_id"), MPI,
    _plain(own.RAY, shown_with="--launcher"), _plain(own.RETIRED), _plain(own.SCRIPT),
)  # fmt: skip

SHOWN_WITH = {group.title: group.shown_with for group in GROUPS if group.shown_with}


@cache
def plugin_groups() -> tuple[OptionGroup, ...]:
    """The options of installed packages that declare a settings class as an entry point `accelerate.options`."""
    return tuple(
        OptionGroup.from_settings(path, f"Options of {name}", section=f"{name}_config", prefix=f"{name}_")
        for name, path in entry_points(OPTIONS_GROUP).items()
    )


PREFIXES = {group.section: group.prefix for group in GROUPS if group.prefix}
SECTIONS = frozenset(group.section for group in GROUPS)


def find(name: str) -> Flag | None:
    """Find the row of an option by its name; None when there is none.

    Settings classes are imported if the name may be in one of them. Entry points of other packages are loaded if none of
    our classes has it.
    """
    loaded = own.ROWS.get(name) or _row_in((group for group in GROUPS if group.is_loaded), name)
    if loaded is not None:
        return loaded
    of_prefix = (group for group in GROUPS if group.prefix and name.startswith(group.prefix))
    without = (group for group in GROUPS if not group.prefix)
    return _row_in((*of_prefix, *without), name) or _row_in(plugin_groups(), name)


def full_name(section: str, key: str) -> str:
    """The name of the option that a key of a section sets; the key may omit the prefix."""
    prefix = PREFIXES.get(section, "")
    if section not in SECTIONS:
        prefix = next((group.prefix for group in plugin_groups() if group.section == section), "")
    return key if key.startswith(prefix) else f"{prefix}{key}"


def is_option(name: str) -> bool:
    """Whether there is an option of this name."""
    return find(name) is not None


def _row_in(groups: Iterable[OptionGroup], name: str) -> Flag | None:
    rows = (row for group in groups for row in group.options)
    return next((row for row in rows if row.name == name), None)


@cache
def known_options() -> dict[str, Flag]:
    """Every option of ours by name; imports all settings classes."""
    return _rows(GROUPS)


def all_options() -> dict[str, Flag]:
    """Every option by name, with those of other packages."""
    return known_options() | _rows(plugin_groups())


def _rows(groups: tuple[OptionGroup, ...]) -> dict[str, Flag]:
    # where two flags set one value, the first one has its default
    return {option.name: option for group in reversed(groups) for option in reversed(group.options)}


def value_of(settings: LaunchSettings, name: str) -> Any:
    """The value of an option that a settings class declares: the given one, or the default."""
    if name in settings.options:
        return settings.options[name]
    option = find(name)
    return option.initial if option is not None else None


def groups_of(settings: LaunchSettings) -> Iterator[OptionGroup]:
    """Yield the groups that affect a launch: ours, and those of other packages if one of their options was given."""
    yield from GROUPS
    loaded = [group for group in GROUPS if group.is_loaded]
    if any(_row_in(loaded, name) is None for name in settings.options):
        yield from plugin_groups()


def add_launch_options(parser: CommandParser) -> None:
    """Add every option to a parser, under its heading; those that `--help` does not show are added when needed."""
    parser.add_argument(HELP_ALL, action="help", help="Show every option, by group, and exit.")
    headings: dict[str, Any] = {"": parser}
    late: list[OptionGroup] = []
    for group in GROUPS:
        if group.title not in headings:
            headings[group.title] = parser.add_argument_group(group.title)
        if group.settings is not None and group.shown_with:
            late.append(group)
        else:
            add_options(headings[group.title], group.options)

    def add_the_rest() -> None:
        for group in (*late, *plugin_groups()):
            heading = headings.get(group.title) or parser.add_argument_group(group.title)
            add_options(heading, group.options)

    parser.late_options = add_the_rest
