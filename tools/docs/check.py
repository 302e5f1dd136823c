"""What must hold of the built site, beside what `mkdocs build --strict` checks (links, anchors, the navigation)."""

from __future__ import annotations

import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
QUESTIONS = {  # what a reader must find from the home page -> a page that answers
    "how do I continue a run?": "checkpoints/",
    "why does it hang?": "hangs-and-crashes/",
    "which parallelism do I choose?": "parallelism/",
    "what does this flag do?": "reference/commands/launch/",
}
CLICKS = 3
ELSEWHERE = re.compile(r"^(?:https?:)?//")


class Page(HTMLParser):
    """Anchors and links of a page.

    Attributes:
        anchors: The ids of its elements.
        links: Where its links lead.
        fetched: What a browser loads to show it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names and where it leads."""
        given = {name: unescape(value or "") for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        loads = tag in ("script", "img") or (tag == "link" and given.get("rel") in ("stylesheet", "preload"))
        if loads and (address := given.get("src") or given.get("href")):
            self.fetched.append(address)


def read_site(folder: Path = SITE) -> dict[str, Page]:
    """The pages of a built site by address relative to its root (`checkpoints/`)."""
    return {
        path.relative_to(folder).as_posix().removesuffix("index.html"): Page(path.read_text())
        for path in folder.rglob("*.html")
        if path.name != "404.html"
    }


def broken_links(site: dict[str, Page], folder: Path = SITE) -> list[str]:
    """Links within the site that lead nowhere, HTML in Markdown and generated pages included."""
    found = []
    for address, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = _joined(address, unquote(parts.path)) if parts.path else address
            if target not in site:
                if not (folder / target).exists():
                    found.append(f"{address}: {link} leads nowhere")
            elif parts.fragment and unquote(parts.fragment) not in site[target].anchors:
                found.append(f"{address}: {link}: the page has no such anchor")
    return found


def _joined(address: str, path: str) -> str:
    parts = address.split("/")[:-1]
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def fetched_elsewhere(site: dict[str, Page]) -> list[str]:
    """What browsers would load from other servers."""
    return [f"{a}: fetches {one}" for a, page in site.items() for one in page.fetched if ELSEWHERE.match(one)]


def clicks_to(site: dict[str, Page], start: str = "") -> dict[str, int]:
    """How many links of page bodies and navigation lead from a page to each other one."""
    found, waiting = {start: 0}, [start]
    for address in waiting:
        for link in site[address].links:
            target = _joined(address, urlsplit(link).path) if not urlsplit(link).scheme else ""
            if target in site and target not in found:
                found[target] = found[address] + 1
                waiting.append(target)
    return found


def far_answers(site: dict[str, Page]) -> list[str]:
    """Questions whose answer is more than three clicks away from the home page."""
    clicks = clicks_to(site)
    return [f"{question} {page} is too far" for question, page in QUESTIONS.items() if clicks.get(page, 99) > CLICKS]


def main() -> int:
    """Print everything that is wrong with the built site; the exit code says whether there was anything."""
    sys.path.insert(0, str(ROOT))
    from tools.docs import api, options

    site = read_site()
    anchors = {f"{address.rstrip('/') or 'index'}.md": page.anchors for address, page in site.items()}
    anchors |= {f"{address}index.md": page.anchors for address, page in site.items()}
    wrong = [
        *broken_links(site),
        *fetched_elsewhere(site),
        *far_answers(site),
        *api.missing(anchors),
        *options.missing(anchors),
    ]
    print("\n".join(wrong) or f"{len(site)} pages, nothing wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
