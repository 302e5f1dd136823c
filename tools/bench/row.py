"""One measured figure and the goal it is held to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A figure of ours beside accelerate 1.15's and the raw floor, all in the same unit and from the same run.

    Args:
        what: What was measured, in words.
        unit: The unit of `ours`, `reference` and `floor`.
        ours: Our figure.
        reference: accelerate 1.15's, None where it has no such thing.
        floor: What the work costs without any library, None where that is zero or means nothing.
        result: The number that `goal` bounds from above.
        goal: The bound.
        result_unit: How to read `result`: "x" for a ratio, else a unit.
    """

    what: str
    unit: str
    ours: float
    reference: float | None
    floor: float | None
    result: float
    goal: float
    result_unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the goal was reached."""
        return self.result <= self.goal

    def cells(self) -> list[str]:
        """The columns of a table."""
        return [
            self.what,
            *(f"{value:,.4g} {self.unit}" if value is not None else "-" for value in (self.reference, self.floor)),
            f"{self.ours:,.4g} {self.unit}",
            f"{self.result:.3g} {self.result_unit}",
            f"<= {self.goal:g} {self.result_unit}",
            "yes" if self.met else "**no**",
        ]


HEADER = ["what", "accelerate 1.15", "floor", "ours", "result", "goal", "met"]


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
