"""One measured figure and the goal it is held to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A figure of ours beside accelerate 1.15's and the raw floor, all in the same unit and from the same run.

    Args:
        what: What was measured, in words.
        unit: The unit of `ours`, `reference` and `floor`.
        ours: Our figure; a string says why there is none.
        reference: accelerate 1.15's; None where it has no such thing, a string where the figure could not be taken.
        floor: What the work costs without any library, None where that is zero or means nothing.
        result: The number that `goal` bounds from above; None where there is no figure.
        goal: The bound; None where there is no figure.
        result_unit: How to read `result`: "x" for a ratio, else a unit.
        spread: Half the interquartile range of `ours`, where it is a median over repetitions.
    """

    what: str
    unit: str
    ours: float | str
    reference: float | str | None
    floor: float | None
    result: float | None
    goal: float | None
    result_unit: str = "x"
    spread: float | None = None

    @property
    def met(self) -> bool:
        """Whether the goal was reached; a figure that was not taken reaches none."""
        return self.result is not None and self.goal is not None and self.result <= self.goal

    def cells(self) -> list[str]:
        """The columns of a table."""
        ours = self._value(self.ours)
        if self.spread is not None:
            ours += f" ± {self.spread:,.2g}"
        cells = [self.what, self._value(self.reference), self._value(self.floor), ours]
        if self.result is None or self.goal is None:
            return [*cells, "-", "-", "not measured"]
        result, goal = f"{self.result:.3g} {self.result_unit}", f"<= {self.goal:g} {self.result_unit}"
        return [*cells, result, goal, "yes" if self.met else "**no**"]

    def _value(self, value: float | str | None) -> str:
        if value is None:
            return "-"
        return value if isinstance(value, str) else f"{value:,.4g} {self.unit}".rstrip()


HEADER = ["what", "accelerate 1.15", "floor", "ours", "result", "goal", "met"]


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
