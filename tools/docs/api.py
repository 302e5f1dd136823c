"""Reference pages of Python names: one page per package, made from what it exports and from its docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache

from tools.docs.names import PublicName, defined_statement, names_of, parsed, resolve

# an object is described on the page of the first module that exports it; later ones only link to it
MODULES = {
    "accel_state": "Who am I: processes, devices, settings, logging.",
    "accel_ops": "Nested structures, collectives, random numbers, memory, safe files.",
    "accel_data": "Data loaders: every sample once, exact resume.",
    "accel_bigmodel": "Models larger than memory.",
    "accel_tracking": "Trackers, progress bars, profiles.",
    "accel_integrations": "Engines, mixed precision, compilation.",
    "accel_cli": "Starting functions on several processes.",
    "accelerate": "The `Accelerator`, and the names that programs import most.",
    "accelerate.local_sgd": "Local SGD: parameters are averaged every few steps.",
    "accelerate.utils": "Everything else that programs written for accelerate 1.15 import.",
    "accelerate.big_modeling": "Import path for models larger than memory.",
    "accelerate.checkpointing": "Training states without an `Accelerator`.",
    "accelerate.data_loader": "Import path for data loaders.",
    "accelerate.hooks": "Import path for what runs around the forward pass of modules.",
    "accelerate.inference": "Pipeline parallel inference.",
    "accelerate.launchers": "Import path for starting functions on several processes.",
    "accelerate.logging": "Import path for logging.",
    "accelerate.optimizer": "Import path for the prepared optimizer.",
    "accelerate.scheduler": "Import path for the prepared scheduler.",
    "accelerate.state": "Import path for the states.",
    "accelerate.tracking": "Import path for trackers.",
}


def page_of(module: str) -> str:
    """The page of a module, relative to docs/."""
    return f"reference/{module.replace('_', '-')}.md"


@cache
def homes() -> dict[str, str]:
    """Which module's page describes an object: canonical path -> module."""
    found: dict[str, str] = {}
    for module in MODULES:
        for name in exports(module):
            found.setdefault(name.canonical, module)
    return found


@cache
def exports(module: str) -> tuple[PublicName, ...]:
    """The public names of a module: of a lazy table, or else what it defines and imports under the same name."""
    try:
        return tuple(names_of(module))
    except ValueError:
        return tuple(sorted(_names_in(module)))


def _names_in(module: str) -> Iterator[PublicName]:
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield PublicName(module, node.name, module, node.name)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("accel"):
            for alias in node.names:
                if alias.asname == alias.name:  # `import name as name` says that it is exported
                    yield PublicName(module, alias.name, *resolve(str(node.module), alias.name))


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of each page."""
    for module in MODULES:
        yield page_of(module), "\n".join(_page(module))


def _page(module: str) -> Iterator[str]:
    yield f"# {module}\n"
    yield f"{MODULES[module]}\n"
    yield "| name | |"
    yield "|---|---|"
    for name in exports(module):
        yield f"| [`{name.name}`][{name.canonical}] | {_first_line(name)} |"
    yield ""
    yield from _entries(name for name in exports(module) if homes()[name.canonical] == module)


def _entries(names: Iterable[PublicName]) -> Iterator[str]:
    described: set[str] = set()
    for name in names:
        if name.canonical in described:
            continue
        described.add(name.canonical)
        yield f'<a id="{name.path}"></a>\n' if name.path != name.canonical else ""
        yield f"::: {name.canonical}"
        yield "    options:"
        yield f"      heading: {name.name}"
        yield f"      toc_label: {name.name}"
        yield ""


def _first_line(name: PublicName) -> str:
    node = defined_statement(name)
    documented = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    text = (ast.get_docstring(node) or "") if documented else ""  # type: ignore[arg-type]
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def missing(built: dict[str, set[str]]) -> list[str]:
    """Public names without an entry in the built site.

    Args:
        built: Page (relative to docs/) -> the anchors that its HTML has.

    Returns:
        One line for each.
    """
    return [
        f"{name.path}: {page_of(homes()[name.canonical])} has no entry for {name.canonical}"
        for module in MODULES
        for name in exports(module)
        if name.canonical not in built.get(page_of(homes()[name.canonical]), set())
    ]
