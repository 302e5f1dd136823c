"""The page "What's new", made from the changelogs of the packages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from tools.docs.names import ROOT

VERSION = re.compile(r"^## (.+)\n", re.MULTILINE)
UNRELEASED = "Unreleased"
FIRST = "accelerate"  # the package that most programs import


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of the page."""
    yield "whats-new.md", "\n".join(_lines())


def releases(text: str) -> Iterator[tuple[str, str]]:
    """The versions of a changelog, as its headings have them, and what changed in each."""
    pieces = VERSION.split(text)[1:]
    yield from zip(pieces[::2], pieces[1::2], strict=True)


def _lines() -> Iterator[str]:
    yield "# What's new\n"
    yield "Newest first. How versions are counted, and how long old names work: [versions and deprecation](versions.md).\n"
    for date, changes in _by_date().items():
        yield f"## {'Not yet released' if date == UNRELEASED else date}\n"
        for title, text in changes:
            yield f"### {title}\n"
            yield re.sub(r"^### (.+)$", r"**\1**", text.strip(), flags=re.MULTILINE) + "\n"


def _by_date() -> dict[str, list[tuple[str, str]]]:
    """Day of a release -> the packages that came out then with what changed in each; first what is not released."""
    packages = sorted(
        (path.parent.name for path in ROOT.glob("packages/*/CHANGELOG.md")), key=lambda name: (name != FIRST, name)
    )
    changes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for package in packages:
        for heading, text in releases((ROOT / "packages" / package / "CHANGELOG.md").read_text()):
            version, _, date = heading.partition(" - ")
            changes[date or UNRELEASED].append((f"{package} {version}" if date else package, text))
    return dict(sorted(changes.items(), reverse=True))
