#!/usr/bin/env python3
"""Check that a method which overrides one of a class of ours says so with `@override`.

mypy then reports an override whose method in the parent was renamed or removed. Its own rule (`explicit-override`) asks for the
mark on every `forward` of a module as well. The compatibility modules and the test scripts keep the form that programs know.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNMARKED = {"compat", "test_utils", "examples"}


@dataclass(frozen=True)
class Class:
    """A class of the packages: where it is, the names of its parents, and its methods."""

    path: Path
    parents: tuple[str, ...]
    methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef]


def name_of(node: ast.expr) -> str:
    """The last word of a parent or decorator: `Tracker` of `tracker.Tracker[Run]`."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def read_classes(files: list[Path]) -> dict[str, Class]:
    """The classes of these files by name; of two with one name the last."""
    return {
        node.name: Class(
            path,
            tuple(name_of(parent) for parent in node.bases),
            {
                method.name: method
                for method in node.body
                if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef))
            },
        )
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def ancestors(name: str, classes: dict[str, Class]) -> Iterator[Class]:
    """The classes above this one, as far as they are ours."""
    for parent in classes[name].parents:
        if parent in classes and parent != name:
            yield classes[parent]
            yield from ancestors(parent, classes)


def unmarked_overrides(classes: dict[str, Class]) -> Iterator[str]:
    """One line for each method that overrides without saying so; special methods need no mark."""
    for name, this in classes.items():
        inherited = {method for ancestor in ancestors(name, classes) for method in ancestor.methods}
        for method, node in this.methods.items():
            marks = {name_of(decorator) for decorator in node.decorator_list}
            if method in inherited and not method.startswith("__") and not marks & {"override", "setter"}:
                yield f"{this.path.relative_to(ROOT)}:{node.lineno}: {name}.{method} overrides: write @override above it"


def main() -> int:
    """Print the unmarked overrides; the exit code says whether there are any."""
    files = [path for path in sorted(ROOT.glob("packages/*/src/**/*.py")) if not UNMARKED & set(path.parts)]
    lines = list(unmarked_overrides(read_classes(files)))
    print("\n".join(lines), end="\n" * bool(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
