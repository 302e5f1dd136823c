"""Options that belong together: one heading in `--help`, one rule on when the script hears of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accel_cli.arguments import Option


def always(settings: Namespace) -> bool:
    """Hand the values on in every launch."""
    return True


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options under one heading.

    Attributes:
        title: The heading. Several groups may share one; empty for the program's own options.
        options: The rows.
        shown_with: The flag that makes `--help` show the group; empty for always.
        handed_when: Given the settings, whether the script gets these values through the environment.
        counts_with: What must be given for that, as messages call it; `shown_with` when empty.
        announced_by: The variable set to `true` to say that the others are there.
    """

    title: str
    options: tuple[Option, ...]
    shown_with: str = ""
    handed_when: Callable[[Namespace], bool] = always
    counts_with: str = ""
    announced_by: str = ""

    def variables(self, settings: Namespace) -> Iterator[tuple[str, str, str]]:
        """Yield (option name, variable, text) for all values that the script is to see.

        Args:
            settings: The resolved settings; a value of None is not handed on.
        """
        if not self.handed_when(settings):
            return
        if self.announced_by:
            yield "", self.announced_by, "true"
        for option in self.options:
            value = getattr(settings, option.name, None)
            if value is None or not option.environment:
                continue
            variables = option.environment.split()
            values = [value] if len(variables) == 1 else value
            for variable, item in zip(variables, values, strict=True):
                if text := option.spelled(item):
                    yield option.name, variable, text
