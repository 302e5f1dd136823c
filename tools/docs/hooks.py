"""What MkDocs calls while it builds the site: adds the generated pages, and turns our Markdown into the site's."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mkdocs.structure.files import File, Files  # noqa: E402

from tools.docs import api, changes, evidence, options, search  # noqa: E402

EXAMPLES = ROOT / "docs" / "examples"
FRAGMENT = re.compile(r"^```py\n", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]+)?\)")
QUOTED_TYPE = re.compile(r"<code>([^<]*`[^<]*)</code>")
DEFAULTS = {"_split_batches": "False"}  # of signatures: a constant that only says "not given" -> what that means
DEFAULT = re.compile(rf">({'|'.join(DEFAULTS)})</")
DIAGRAM = re.compile(r"!\[([^\]]*)\]\((?:\.\./)*diagrams/([\w-]+)\.svg\)")


def on_config(config: Any) -> Any:
    """Show the version of the umbrella package in the header."""
    with (ROOT / "packages" / "accelerate" / "pyproject.toml").open("rb") as file:
        config.site_name = f"accelerate {tomllib.load(file)['project']['version']}"
    if "DOCS_VERSIONED" in os.environ:  # the list of versions is there only once they are published
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, text in (*api.pages(), *options.pages(), *changes.pages(), *evidence.pages()):
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Caption fragments, draw diagrams into the page, and name files of the repository that the site does not have."""
    if page.file.src_uri != evidence.PATH:
        markdown = evidence.without_evidence(markdown)
    page.meta.update(search.page_settings(page.file.src_uri))
    markdown = FRAGMENT.sub('```python title="fragment"\n', markdown)
    markdown = DIAGRAM.sub(_drawn, markdown)
    folder = (Path("docs") / page.file.src_uri).parent
    return LINK.sub(lambda link: _outside(link, folder, str(config.repo_url or "")), markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Types in docstrings stand between backticks, which the reference shows as code already."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    html = DEFAULT.sub(lambda name: name[0].replace(name[1], DEFAULTS[name[1]]), html)
    return QUOTED_TYPE.sub(lambda code: code[0].replace("`", "").replace("*optional*", "optional"), html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Have the page search as `tools.docs.search` says."""
    return search.use_plain_queries(output)


def on_post_build(config: Any) -> None:
    """Add what the search needs."""
    search.write_queries(Path(config.site_dir))
    search.add_options(Path(config.site_dir))


def _drawn(image: re.Match[str]) -> str:
    svg = (ROOT / "docs" / "diagrams" / f"{image[2]}.svg").read_text()
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{image[1]}" ', 1)
    return f'<figure class="diagram">\n{svg}\n</figure>'


def _outside(link: re.Match[str], folder: Path, repository: str) -> str:
    target = (ROOT / folder / link[2]).resolve()
    if target.is_relative_to(ROOT / "docs") and not target.is_relative_to(EXAMPLES):
        return link[0]
    path = target.relative_to(ROOT).as_posix()
    return f"[{link[1]}]({repository}/blob/main/{path}{link[3] or ''})" if repository else f"{link[1]} (`{path}`)"
