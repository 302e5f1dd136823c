"""Looking through what a config file says: all mistakes are named at once, each with its line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accel_cli.configfile.migrate import migrate, old_spellings
from accel_cli.configfile.source import Source
from accel_cli.errors import did_you_mean
from accel_cli.launch.flags.table import DEEPSPEED, PREFIXES, find, foreign_groups, full_name, is_option
from accel_cli.launch.values import check_word, coerce

ADVICE = "Correct or remove them, or upgrade accelerate where a newer version wrote the file."


class Check:
    """Looks through one file, and collects what is wrong with it.

    Args:
        written: What the file says.
        source: The file.

    Attributes:
        mistakes: What was found so far, in words that name the file and the line.
    """

    def __init__(self, written: dict[str, Any], source: Source) -> None:
        self.written = written
        self.source = source
        self.mistakes: list[str] = []

    def finish(self) -> None:
        """Tell of everything that was found.

        Raises:
            ValueError: When something was.
        """
        if len(self.mistakes) == 1:
            raise ValueError(self.mistakes[0])
        if self.mistakes:
            own = str(self.source)
            lines = [f"  - {mistake.removeprefix(own).removeprefix(', ').strip()}" for mistake in self.mistakes]
            raise ValueError("\n".join([f"{own} has {len(lines)} mistakes:", *lines]))

    def sections(self, names: Iterable[str]) -> None:
        """Refuse sections that are none: nothing else can be looked at then.

        Raises:
            ValueError: Naming them.
        """
        for name in names:
            content = self.written.get(name)
            if content is not None and not isinstance(content, dict):
                self.mistakes.append(f"{self.source.at(name)}: {name} must hold `key: value` pairs, got {content!r}.")
        self.finish()

    def up_to_date(self) -> dict[str, Any]:
        """Return what the file says, in today's words where older ones would not be understood."""
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
        """Refuse keys that do not exist, and return the sections of other packages."""
        unknown = {str(key) for key in set(values) - set(known)}
        sections = unknown & {group.section for group in foreign_groups()} if unknown else set()
        if sections:
            self.sections(sections)
        for key in sorted(unknown - sections):
            hint = _home_of(key, known) or did_you_mean(key, known)
            self.mistakes.append(f"{self.source.at(key)} has unknown keys: {[key]}. {ADVICE}{hint}")
        return sections

    def values(self, values: dict[str, Any]) -> None:
        """Refuse values that their launch options do not allow."""
        for key, value in values.items():
            if isinstance(value, dict):
                for name, item in value.items():
                    self._value(f"{key}.{name}", full_name(key, str(name)), item)
            else:
                self._value(key, key, value)

    def missing(self, names: list[str]) -> None:
        """Refuse a file that lacks something."""
        if names:
            self.mistakes.append(f"{self.source} lacks {', '.join(names)}.")

    @contextmanager
    def naming(self, key: str) -> Iterator[None]:
        """Note the error that ends a block, with the file and the line of a key."""
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
            check_word(option, value, where)

    def _as_written(self, key: str) -> str:
        for spelling in old_spellings(key):
            section, _, name = spelling.rpartition(".")
            if name in (self.written.get(section, {}) if section else self.written):
                return spelling
        return key


def _home_of(name: str, known: list[str]) -> str:
    """Say in which section an option belongs that stands outside of all."""
    homes = [section for section, prefix in PREFIXES.items() if name.startswith(prefix) and is_option(name)]
    if name in [option.name for option in DEEPSPEED.options]:
        homes = ["deepspeed_config"]
    return f" Put {name} into the section {homes[0]}." if homes and homes[0] in known else ""
