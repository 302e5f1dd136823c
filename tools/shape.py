#!/usr/bin/env python3
"""Show the shape of the packages in figures: modules, their lengths, who calls and imports whom, circles of imports."""

from __future__ import annotations

import ast
import re
import statistics
import sys
import tomllib
from collections import Counter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.check_cycles import circles  # noqa: E402

CRUMB_LINES = 110
ENGINE_QUESTIONS = re.compile(
    r"is_fsdp2|writes_states|divides_losses|distributed_type\s*(?:==|!=|in)|\.engine\.name\b"
)


def main() -> int:
    """Print one figure per line; with `--crumbs`, the small modules with one importer too."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = settings["root_packages"]
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    paths = sorted(path for path in ROOT.glob("packages/*/src/**/*.py") if path.name != "__init__.py")
    texts = {path: path.read_text() for path in paths}
    lengths = [text.count("\n") for text in texts.values()]
    private: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.endswith("__"):
                private[node.name] += 1
        words.update(re.findall(r"\b_\w+", text))
    called_once = sum(count for name, count in private.items() if words[name] == 2 * count)
    crumbs = []
    for path, length in zip(paths, lengths, strict=True):
        name = ".".join(path.relative_to(ROOT / "packages").parts[2:]).removesuffix(".py")
        if length < CRUMB_LINES and name in graph.modules and len(graph.find_modules_that_directly_import(name)) == 1:
            crumbs.append((name, length))
    found = list(circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}))
    questions = sum(len(ENGINE_QUESTIONS.findall(text)) for text in texts.values())
    print(
        f"modules {len(paths)}, lines {sum(lengths)}, mean {statistics.mean(lengths):.0f}, over 400 {sum(n > 400 for n in lengths)}"
    )
    print(f"private functions {sum(private.values())}, called once {called_once}")
    print(f"modules under {CRUMB_LINES} lines with one importer {len(crumbs)}")
    print(f"circles of imports {len(found)}, with {sum(map(len, found))} modules")
    print(f"places that ask which engine {questions}")
    if "--crumbs" in sys.argv:
        for name, length in crumbs:
            print(f"    {length:4} {name} <- {next(iter(graph.find_modules_that_directly_import(name)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
