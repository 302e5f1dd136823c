"""The READMEs of packages say what they are for, how to install them, and where to read on; they render on PyPI."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def how_to_install(package: Path) -> list[str]:
    """The folders that a checkout installs a package from, those that it needs first."""
    names: list[str] = []

    def add(name: str) -> None:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
        for needed in project["dependencies"]:
            if match := re.match(r"accel-\w+", needed):
                add(match[0])
        if name not in names:
            names.append(name)

    add(package.name)
    return (
        ["./packages/*"]
        if len(names) == len(list(ROOT.glob("packages/*")))
        else [f"./packages/{name}" for name in names]
    )


@pytest.mark.parametrize("package", sorted(ROOT.glob("packages/*")), ids=lambda path: path.name)
def test_a_readme_leads_on(package: Path) -> None:
    text = (package / "README.md").read_text()
    assert [command.split() for command in re.findall(r"^    pip install (.+)$", text, re.MULTILINE)][:1] == [
        how_to_install(package)
    ]
    assert re.findall(r"\]\((?!https?:|#)", text) == [], "PyPI has no files beside the README"
    named = re.findall(r"^- `(docs/\S+)`: ", text.partition("## Read on")[2], re.MULTILINE)
    assert len(named) >= 2
    assert [page for page in named if not (ROOT / page).exists()] == []
