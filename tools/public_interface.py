"""What a package exports, read from its source, and what changed between two states of it.

The interface of a package are the names that `from package import name` knows. They are loaded lazily, from a table in
`__init__.py`; the table is read as data here, and what it names is parsed, never imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import griffe


@dataclass(frozen=True)
class Changes:
    """What changed in an interface.

    Args:
        breaking: One line each: a name or parameter that is gone, or one more that must be given.
        added: Names that are new.
    """

    breaking: tuple[str, ...]
    added: tuple[str, ...]


def exported_names(init: Path) -> dict[str, tuple[str, str]]:
    """Defining module and name of each export.

    Args:
        init: The `__init__.py` of a package.

    Raises:
        ValueError: When it has no table for `lazy_exports`.
    """
    tree = ast.parse(init.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lazy_exports":
            table: dict[str, str] = ast.literal_eval(_assigned(tree, node.args[1]))
            return dict(_entry(module, text) for module, names in table.items() for text in names.split())
    raise ValueError(f"{init} has no call of lazy_exports(__name__, {{...}})")


def _assigned(tree: ast.Module, node: ast.expr) -> ast.expr:
    if not isinstance(node, ast.Name):
        return node
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
            return statement.value  # type: ignore[attr-defined,no-any-return]
    raise ValueError(f"{node.id} is not assigned at the top of the module")


def _entry(module: str, text: str) -> tuple[str, tuple[str, str]]:
    name, _, source = text.partition("=")
    return name, (module, source or name)


def interface(module: str, sources: Iterable[Path]) -> griffe.Module:
    """The exports of a package as one flat module, wherever they are defined.

    Args:
        module: Its import name.
        sources: The `src` folders of all packages of one state of the repository.
    """
    folders = [folder for folder in sources if folder.is_dir()]
    home = next(folder for folder in folders if (folder / module).is_dir())
    loader = griffe.GriffeLoader(search_paths=folders, allow_inspection=False)
    flat = griffe.Module(module)
    flat.exports = []
    for name, (defining, source) in sorted(exported_names(home / module / "__init__.py").items()):
        found = _find(loader, defining, source)
        if found is not None:
            found.name = name  # what it is exported as decides whether it is public
            flat.set_member(name, found)
            flat.exports.append(name)
    return flat


def _find(loader: griffe.GriffeLoader, module: str, name: str) -> griffe.Object | griffe.Alias | None:
    """The object; None for what another library defines."""
    package = loader.modules_collection.members.get(module.partition(".")[0]) or loader.load(module.partition(".")[0])
    path = f"{module}.{name}".split(".")[1:]
    found = package[path]
    if not found.is_alias:
        return found
    try:
        return found.final_target
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def compare(old: griffe.Module, new: griffe.Module) -> Changes:
    """What changed from one state to a later one."""
    style = griffe.ExplanationStyle.MARKDOWN
    breaking = [breakage.explain(style=style).strip() for breakage in griffe.find_breaking_changes(old, new)]
    return Changes(tuple(breaking), tuple(sorted(set(new.exports or ()) - set(old.exports or ()))))  # type: ignore[arg-type]
