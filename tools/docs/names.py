"""The public names of every package, and where each is defined."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.public_interface import exported_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "accelerate": "accelerate",
    "accel-cli": "accel_cli",
    "accel-integrations": "accel_integrations",
    "accel-data": "accel_data",
    "accel-bigmodel": "accel_bigmodel",
    "accel-tracking": "accel_tracking",
    "accel-ops": "accel_ops",
    "accel-state": "accel_state",
}


@dataclass(frozen=True, slots=True, order=True)
class PublicName:
    """A name that programs may import.

    Attributes:
        module: Where it is imported from (`accel_ops`).
        name: Its name there.
        defined_in: The module that defines it.
        source: Its name in that module.
    """

    module: str
    name: str
    defined_in: str
    source: str

    @property
    def path(self) -> str:
        """What a program imports."""
        return f"{self.module}.{self.name}"

    @property
    def canonical(self) -> str:
        """Where it is defined."""
        return f"{self.defined_in}.{self.source}"


@cache
def parsed(module: str) -> ast.Module:
    """The syntax tree of one of our modules."""
    return ast.parse(source_of(module).read_text())


@cache
def source_of(module: str) -> Path:
    """The file of one of our modules.

    Args:
        module: Its dotted name.

    Raises:
        FileNotFoundError: When no package has it.
    """
    parts = module.split(".")
    for package in PACKAGES:
        base = ROOT / "packages" / package / "src" / Path(*parts)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    raise FileNotFoundError(f"no package has the module {module}")


def names_of(module: str) -> list[PublicName]:
    """The public names of a package, sorted.

    Args:
        module: Its import name, or that of one of its lazy modules (`accelerate.utils`).
    """
    exported = exported_names(source_of(module)).items()
    return sorted(PublicName(module, name, *resolve(*where)) for name, where in exported)


def resolve(module: str, name: str) -> tuple[str, str]:
    """Follow imports to the module that defines a name.

    Args:
        module: Where it is imported from.
        name: The name.

    Returns:
        Module and name of its definition; the last ones of ours where another library defines it.
    """
    seen: set[tuple[str, str]] = set()
    while (module, name) not in seen:
        seen.add((module, name))
        found = _imported(module, name)
        if found is None or not found[0].startswith("accel"):
            break
        module, name = found
    return module, name


def _imported(module: str, name: str) -> tuple[str, str] | None:
    """Where a module imports a name from; None when it defines it."""
    return _imports(module).get(name)


@cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def defined_statement(name: PublicName) -> ast.stmt | None:
    """The statement of a module that defines a name; None when another library does."""
    for node in parsed(name.defined_in).body:
        if any(bound == name.source for bound in _bound(node)):
            return node
    return None


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    yield from (target.id for target in targets if isinstance(target, ast.Name))
