"""The rows of the report."""

from __future__ import annotations

from dataclasses import dataclass, field

OK, DIFFERS, FAILED, NOT_RUN = "ok", "differs", "failed", "not run"
HEADS = ("configuration", "ranks", "loss", "gradient norm", "update", "seconds", "")


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one configuration.

    Attributes:
        name: Of the configuration.
        ranks: How many.
        status: `OK`, `DIFFERS`, `FAILED` or `NOT_RUN`.
        reason: In a sentence; empty where it is `OK`.
        errors: The largest relative differences, by figure; empty where nothing was compared.
        seconds: How long the launch took.
    """

    name: str
    ranks: int
    status: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def cells(self) -> tuple[str, ...]:
        """One for each of `HEADS`."""
        figures = [f"{self.errors[name]:.1e}" if self.errors else "" for name in ("loss", "norm", "update")]
        result = f"{self.status}: {self.reason}" if self.reason else self.status
        return (self.name, str(self.ranks), *figures, f"{self.seconds:.0f}", result)


WIDTHS = (max(len("configuration"), 13), 5, 8, 13, 8, 7, 0)


def line(cells: tuple[str, ...]) -> str:
    """A line of the table, whose widths are fixed, so that each can be printed as soon as it is known."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()
