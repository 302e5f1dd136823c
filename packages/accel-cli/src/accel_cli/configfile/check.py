"""Checking a config file: all errors are reported at once, each with its line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accel_cli.configfile.migrate import migrate, old_spellings
from accel_cli.configfile.source import Source
from accel_cli.errors import did_you_mean
from accel_cli.launch.flags.table import DEEPSPEED, PREFIXES, find, full_name, is_option, plugin_groups
from accel_cli.launch.values import check_choice, coerce

ADVICE = "Correct or remove them, or upgrade accelerate where a newer version wrote the file."


class Check:
    """Checks one file, and collects its errors.

    Args:
        written: The content of the file.
        source: The file.

    Attributes:
        mistakes: The messages so far, each with the file and the line.
    """

    def __init__(self, written: dict[str, Any], source: Source) -> None:
        self.written = written
        self.source = source
        self.mistakes: list[str] = []

    def finish(self) -> None:
        """Raise an error with everything that was found.

        Raises:
            ValueError: There is at least one error.
        """
        if len(self.mistakes) == 1:
            raise ValueError(self.mistakes[0])
        if self.mistakes:
            own = str(self.source)
            lines = [f"  - {mistake.removeprefix(own).removeprefix(', ').strip()}" for mistake in self.mistakes]
            raise ValueError("\n".join([f"{own} has {len(lines)} errors:", *lines]))

    def sections(self, names: Iterable[str]) -> None:
        """Check that sections are mappings; if not, nothing else can be checked.

        Raises:
            ValueError: Some are not.
        """
        for name in names:
            content = self.written.get(name)
            if content is not None and not isinstance(content, dict):
                self.mistakes.append(
                    f"{self.source.at(name)}: {name} must contain `key: value` pairs, got {content!r}."
                )
        self.finish()

    def up_to_date(self) -> dict[str, Any]:
        """Return the content of the file, with keys of older versions renamed."""
        values, done = migrate(self.written, loading=True)
        for item in done:
            if not item.change.new:
                import logging

                logging.getLogger("accelerate").warning(
                    "%s: %s has no effect any more (%s); `accelerate config update` removes it.",
                    self.source.at(item.change.old), item.change.old, item.change.why,
                )  # fmt: skip
        return values

    def keys(self, values: dict[str, Any], known: list[str]) -> set[str]:
        """Check for unknown keys, and return the sections of other packages."""
        unknown = {str(key) for key in set(values) - set(known)}
        sections = unknown & {group.section for group in plugin_groups()} if unknown else set()
        if sections:
            self.sections(sections)
        for key in sorted(unknown - sections):
            hint = _home_of(key, known) or did_you_mean(key, known)
            self.mistakes.append(f"{self.source.at(key)} has unknown keys: {[key]}. {ADVICE}{hint}")
        return sections

    def values(self, values: dict[str, Any]) -> None:
        """Check values by their launch options."""
        for key, value in values.items():
            if isinstance(value, dict):
                for name, item in value.items():
                    self._value(f"{key}.{name}", full_name(key, str(name)), item)
            else:
                self._value(key, key, value)

    def missing(self, names: list[str]) -> None:
        """Report missing keys."""
        if names:
            self.mistakes.append(
                f"{self.source} has no {', no '.join(names)}. Add {'it' if len(names) == 1 else 'them'}."
            )

    @contextmanager
    def naming(self, key: str) -> Iterator[None]:
        """Collect the error that ends a block, with the file and the line of a key."""
        try:
            yield
        except ValueError as error:
            self.mistakes.append(f"{self.source.at(*old_spellings(key))}: {error}")

    def _value(self, key: str, name: str, value: Any) -> None:
        option = find(name) if value is not None else None
        if option is None:
            return
        with self.naming(key):
            where = self._as_written(key)
            coerce(option, value, where)
            check_choice(option, value, where)

    def _as_written(self, key: str) -> str:
        for spelling in old_spellings(key):
            section, _, name = spelling.rpartition(".")
            if name in (self.written.get(section, {}) if section else self.written):
                return spelling
        return key


def _home_of(name: str, known: list[str]) -> str:
    """The hint for an option that belongs into a section."""
    homes = [section for section, prefix in PREFIXES.items() if name.startswith(prefix) and is_option(name)]
    if name in [option.name for option in DEEPSPEED.options]:
        homes = ["deepspeed_config"]
    return f" Put {name} into the section {homes[0]}." if homes and homes[0] in known else ""
