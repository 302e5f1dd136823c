"""Every ```python block of the READMEs and of docs/ runs.

Fragments that cannot stand alone are fenced as ```py, and say in their first line what they need. Blocks with a title
are files, which the page's terminal blocks run (test_consoles.py).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tools.docs import api, changes, evidence, options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        lines_before = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines_before + block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fragments_say_that_they_are_fragments(page: Path) -> None:
    fragments = re.findall(r"^```py\n(.*)", page.read_text(), re.MULTILINE)
    assert all(first.startswith("# fragment: needs ") for first in fragments)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_titled_files_are_run(page: Path) -> None:
    text = page.read_text()
    consoles = "".join(re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    titles = re.findall(r'^```python title="([\w.]+)"', text, re.MULTILINE)
    assert [title for title in titles if title not in consoles and f"from {title[:-3]} import" not in text] == []


@cache
def generated() -> set[Path]:
    """Pages that exist in the built site only."""
    pages = (*api.pages(), *options.pages(), *changes.pages(), *evidence.pages())
    return {ROOT / "docs" / path for path, _ in pages}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert [target for target in broken if (page.parent / target).resolve() not in generated()] == []


@pytest.mark.parametrize("package", sorted(ROOT.glob("packages/*")), ids=lambda path: path.name)
def test_every_package_shows_itself(package: Path) -> None:
    assert BLOCK.search((package / "README.md").read_text()), "a README shows a ten-line example"
    assert "## Unreleased" in (package / "CHANGELOG.md").read_text()
    module = package / "src" / package.name.replace("-", "_")
    assert (module / "py.typed").exists()
