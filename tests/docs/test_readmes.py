"""The READMEs of packages say what they are for, how to install them, and where to read on; they render on PyPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("package", sorted(ROOT.glob("packages/*")), ids=lambda path: path.name)
def test_a_readme_leads_on(package: Path) -> None:
    text = (package / "README.md").read_text()
    assert f"    pip install {package.name}\n" in text
    assert re.findall(r"\]\((?!https?:|#)", text) == [], "PyPI has no files beside the README"
    named = re.findall(r"^- `(docs/\S+)`: ", text.partition("## Read on")[2], re.MULTILINE)
    assert len(named) >= 2
    assert [page for page in named if not (ROOT / page).exists()] == []
