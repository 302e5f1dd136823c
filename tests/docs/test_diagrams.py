"""The diagrams in docs/ are those that the code draws, and each stands on a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import diagrams

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_a_diagram_is_up_to_date_and_shown(name: str) -> None:
    """For the package graph this means: it shows the imports that the code has."""
    assert (DOCS / "diagrams" / f"{name}.svg").read_text() == diagrams.DIAGRAMS[name]().svg(), (
        "run: uv run python -m tools.docs.diagrams"
    )
    assert any(f"diagrams/{name}.svg)" in page.read_text() for page in DOCS.glob("**/*.md"))


def test_what_follows_from_other_imports_is_not_drawn() -> None:
    assert diagrams.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
