"""How what pages say was checked stands in their sources beside it; on the site it is a page of its own, for contributors.

Two kinds of evidence: columns of tables whose heading is in `COLUMNS`, and parts between `<!-- evidence -->` and
`<!-- /evidence -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.docs.names import ROOT

DOCS = ROOT / "docs"
PATH = "evidence.md"
COLUMNS = {"checked", "goal", "met", "test"}
PART = re.compile(r"^<!-- evidence -->\n(.*?)^<!-- /evidence -->\n", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
CELL = re.compile(r"(?<!\\)\|")
INTRODUCTION = """# What was checked, and how

For contributors: how the sentences and figures of the other pages came about, with the goals that they are measured against.
Readers of those pages see what holds; this page has the bookkeeping.
"""


def without_evidence(markdown: str) -> str:
    """A page as its readers see it."""
    return TABLE.sub(lambda table: _without_columns(table[0]), PART.sub("", markdown))


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of the contributors' page."""
    yield PATH, "\n".join((INTRODUCTION, *_chapters()))


def _chapters() -> Iterator[str]:
    for path in sorted(DOCS.glob("**/*.md")):
        name = path.relative_to(DOCS)
        text = path.read_text()
        parts = [*PART.findall(text), *(table for table in TABLE.findall(PART.sub("", text)) if _is_checked(table))]
        if parts:
            folder = "" if str(name.parent) == "." else f"{name.parent}/"
            title = text.partition("\n")[0].removeprefix("# ")
            yield f"## [{title}]({name})\n"
            yield from (_deeper(_from_top(part, folder)) for part in parts)


def _is_checked(table: str) -> bool:
    return _without_columns(table) != table


def _without_columns(table: str) -> str:
    rows = [[cell.strip() for cell in CELL.split(line)[1:-1]] for line in table.splitlines()]
    shown = [index for index, title in enumerate(rows[0]) if title not in COLUMNS]
    if len(shown) == len(rows[0]):
        return table
    rows[1] = ["---"] * len(rows[0])
    return "".join("| " + " | ".join(row[index] for index in shown) + " |\n" for row in rows)


def _deeper(markdown: str) -> str:
    """Headings one level down, below that of the page."""
    return re.sub(r"^(#+) ", r"#\1 ", markdown, flags=re.MULTILINE)


def _from_top(markdown: str, folder: str) -> str:
    """Links of a page in a folder, relative to docs/."""
    return re.sub(r"\]\((?!\w+:|#)", f"]({folder}", markdown) if folder else markdown
