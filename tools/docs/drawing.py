"""Diagrams as SVG: boxes and arrows on a grid, in the colours of the page around them, light or dark."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

UNIT = 10  # pixels
STYLE = (
    ".dg{color:#222;font:13px system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){.dg{color:#ddd}}"
    ".dg text{fill:currentColor;text-anchor:middle;dominant-baseline:central}"
    ".dg .left{text-anchor:start}.dg .small{font-size:11px}"
    ".dg rect{fill:currentColor;fill-opacity:.05;stroke:currentColor;stroke-opacity:.5;rx:4px}"
    ".dg .hot rect{fill:#5c6bc0;fill-opacity:.25;stroke:#5c6bc0;stroke-opacity:1}"
    ".dg .warm rect{fill:#26a69a;fill-opacity:.22;stroke:#26a69a;stroke-opacity:1}"
    ".dg .off rect{fill-opacity:0;stroke-dasharray:4 3}"
    ".dg path{fill:none;stroke:currentColor;stroke-opacity:.75;stroke-width:1.3;marker-end:url(#dg-tip)}"
    ".dg marker path{fill:currentColor;stroke:none}"
)


@dataclass
class Drawing:
    """A diagram in the making.

    Args:
        width: Of the whole, in units of ten pixels.
        height: Of the whole.
    """

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, text: str, kind: str = "", height: float = 4) -> None:
        r"""Draw a box.

        Args:
            x: Its left edge, in units.
            y: Its upper edge.
            width: In units.
            text: Lines separated by `\n`; those after the first are small.
            kind: `"hot"`, `"warm"` or `"off"`; plain when empty.
            height: In units.
        """
        shape = f'<rect x="{x * UNIT:g}" y="{y * UNIT:g}" width="{width * UNIT:g}" height="{height * UNIT:g}"/>'
        lines = text.split("\n")
        first = y + height / 2 - 0.75 * (len(lines) - 1)
        words = "".join(
            self._text(x + width / 2, first + 1.5 * number, line, "small" if number else "")
            for number, line in enumerate(lines)
        )
        self.parts.append(f'<g class="{kind}">{shape}{words}</g>' if kind else f"<g>{shape}{words}</g>")

    def note(self, x: float, y: float, text: str, *, left: bool = False) -> None:
        """Write small text, centred at a place or beginning there."""
        self.parts.append(self._text(x, y, text, "left small" if left else "small"))

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw an arrow through places, to the last one."""
        path = "L".join(f"{x * UNIT:g} {y * UNIT:g}" for x, y in points)
        self.parts.append(f'<path d="M{path}"/>')

    def _text(self, x: float, y: float, text: str, kind: str) -> str:
        name = f' class="{kind}"' if kind else ""
        return f'<text x="{x * UNIT:g}" y="{y * UNIT:g}"{name}>{escape(text)}</text>'

    def svg(self) -> str:
        """The file."""
        size = f"{self.width * UNIT:g} {self.height * UNIT:g}"
        tip = '<marker id="dg-tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto"><path d="M0 0L8 3L0 6z"/></marker>'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="dg" viewBox="0 0 {size}" '
            f'width="{self.width * UNIT:g}"><style>{STYLE}</style><defs>{tip}</defs>'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"
