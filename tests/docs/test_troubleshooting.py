"""Every entry of the troubleshooting page begins as a message does: of ours here, of torch in `test_torch_messages.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def messages() -> str:
    """All strings of the packages' code, one a line; what is filled in is `...`."""
    found = []
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(map(str, parts)).replace("\n", " "))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.replace("\n", " "))
    return "\n".join(found)


def test_entries_begin_as_messages_do() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    printed = messages()
    ours = page.partition("## Messages of torch")[0]
    entries = re.findall(r"^### (.*)$", ours, re.MULTILINE)
    assert len(entries) > 20
    invented = [
        entry
        for entry in entries
        if not re.search(".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", entry))), printed)
    ]
    assert invented == []
