"""Option groups: one heading in `--help`, and one condition on which their values are passed to the script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

from accel_cli.arguments import Flag
from accel_cli.launch.settings import LaunchSettings
from accel_state.settings.option import SAME, Option, options_of


def always(settings: LaunchSettings) -> bool:
    """Pass the values in every launch."""
    return True


@dataclass(frozen=True, eq=False)
class OptionGroup:
    """Options under one heading.

    Attributes:
        title: The heading. Several groups may share one; empty for the program's own options.
        own: The rows of options that no settings class declares.
        settings: The dataclass whose fields are options, or `"module:Class"`, which is imported on first use.
        launch_defaults: Field name -> default of the launcher, for fields that do not declare one.
        shown_with: The flag that makes `--help` show the group; empty for always.
        passed_when: Given the settings, whether these values are passed to the script as environment variables.
        requires: The flags that this needs, for messages; `shown_with` when empty.
        enabled_by: The environment variable that is set to `true` when they are passed.
        section: The section of the config file that holds the values; empty for none.
        prefix: The prefix of all option names, which keys of the section may omit; empty for none.
    """

    title: str
    own: tuple[Flag, ...] = ()
    settings: type | str | None = None
    launch_defaults: Mapping[str, Any] = field(default_factory=dict)
    shown_with: str = ""
    passed_when: Callable[[LaunchSettings], bool] = always
    requires: str = ""
    enabled_by: str = ""
    section: str = ""
    prefix: str = ""

    @classmethod
    def from_settings(cls, settings: type | str, title: str, **more: Any) -> OptionGroup:
        """Make a group of the fields of a settings class that have a flag or a key.

        Args:
            settings: The dataclass, or `"module:Class"`.
            title: The heading.
            **more: The other attributes.
        """
        return cls(title, settings=settings, **more)

    @cached_property
    def options(self) -> tuple[Flag, ...]:
        """The rows; the first access imports the settings class."""
        if self.settings is None:
            return self.own
        found = options_of(_load(self.settings))
        rows = (
            _row(known, self.launch_defaults.get(name, known.launch_default))
            for name, known in found.items()
            if known.flag or known.key
        )
        return (*rows, *self.own)

    @property
    def is_loaded(self) -> bool:
        """Whether the rows are available without importing a settings class."""
        return self.settings is None or "options" in self.__dict__

    def value(self, option: Flag, settings: LaunchSettings) -> Any:
        """The value of one of the options: the given one, or the default."""
        if option in self.own:
            return getattr(settings, option.name)
        return settings.options.get(option.name, option.initial)

    def variables(self, settings: LaunchSettings) -> Iterator[tuple[str, str, str]]:
        """Yield (option name, environment variable, its value) for all values that are passed to the script.

        Args:
            settings: The settings; values of None are not passed.
        """
        if not self.passed_when(settings):
            return
        if self.enabled_by:
            yield "", self.enabled_by, "true"
        for option in self.options:
            value = self.value(option, settings)
            if value is None or not option.environment:
                continue
            variables = option.environment.split()
            values = [value] if len(variables) == 1 else value
            for variable, item in zip(variables, values, strict=True):
                if text := option.spell(item):
                    yield option.name, variable, text


def _load(settings: type | str) -> type:
    if not isinstance(settings, str):
        return settings
    module, _, name = settings.partition(":")
    settings_class: type = getattr(import_module(module), name)
    return settings_class


def _row(known: Option, launch_default: Any) -> Flag:
    """Make the row of a command-line option from the option of a settings class."""
    default = known.fallback if launch_default is SAME else launch_default
    if known.as_text and default is not None:
        default = known.kind.spell(default).lower() if isinstance(default, bool) else str(default)
    return Flag(
        known.flag or "",
        known.help,
        default=bool(default) if known.switch else default,
        kind=known.kind,
        as_text=known.as_text,
        action="store_true" if known.switch else "store",
        dest=known.key,
        environment=known.env or "",
    )
