#!/usr/bin/env python3
"""Check that no modules import one another in a circle, type-checking imports included.

import-linter keeps packages in layers; inside a package, a circle means that two modules are one idea, or that one knows too
much.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]


def circles(imports: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """The groups of modules that import one another, found by Tarjan's algorithm for strongly connected components."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for imported in sorted(imports[module]):
            if imported not in order:
                yield from visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            start = stack.index(module)
            found = stack[start:]
            del stack[start:]
            if len(found) > 1:
                yield sorted(found)

    for module in sorted(imports):
        if module not in order:
            yield from visit(module)


def main() -> int:
    """Print the circles; the exit code says whether there are any."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    graph = grimp.build_graph(*settings["root_packages"], exclude_type_checking_imports=False, cache_dir=None)
    found = list(circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}))
    for modules in found:
        print("These modules import one another in a circle:")
        for module in modules:
            others = sorted(set(modules) & graph.find_modules_directly_imported_by(module))
            print(f"    {module} -> {', '.join(others)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
