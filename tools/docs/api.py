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

BY_TOPIC = "accelerate.utils"  # has too many names for one page
TOPICS = {  # of that module: the last part of the page's name -> its title, and where names of the topic are defined
    "settings": ("settings and enums", ("accel_state.settings", "accel_state.mesh", "accel_state.enums")),
    "communication": (
        "collectives, nested data, random numbers, memory",
        ("accel_ops.collectives", "accel_ops.nested", "accel_ops.batches", "accel_ops.placement", "accel_ops.random",
         "accel_ops.memory"),
    ),
    "models": ("models larger than memory, modules", ("accel_bigmodel", "accel_ops", "accel_integrations.bitsandbytes")),
    "checks": (
        "installed libraries, hardware, environment",
        ("accel_state.libraries", "accel_state.hardware", "accel_state.nvidia", "accel_state.environment", "accel_state.kernel",
         "accel_state.numa"),
    ),
    "files": ("names of files, checkpoints", ("accel_ops.files", "accel_integrations.training_state", "accel_state.constants")),
    "engines": ("engines, precisions, launching", ("accel_integrations", "accelerate", "accel_cli")),
}  # fmt: skip
FIRST = (  # what most programs call of the `Accelerator`, in the order of a training loop
    "prepare", "accumulate", "backward", "clip_grad_norm_", "gather_for_metrics", "save_state", "load_state", "resume",
    "unwrap_model", "save_model", "print", "wait_for_everyone", "log", "init_trackers", "end_training",
)  # fmt: skip


def page_of(module: str) -> str:
    """The page of a module, relative to docs/."""
    return f"reference/{module.replace('_', '-')}.md"


@cache
def homes() -> dict[str, str]:
    """Which page describes an object: canonical path -> page."""
    pages: dict[str, str] = {}
    for module in MODULES:
        for name in exports(module):
            pages.setdefault(name.canonical, topic_page(name) if module == BY_TOPIC else page_of(module))
    return pages


def topic_page(name: PublicName) -> str:
    """The page of a name of the module that has a page for each topic."""
    return f"reference/{BY_TOPIC}.{topic_of(name)}.md"


def topic_of(name: PublicName) -> str:
    """The topic with the longest prefix of the module that defines the name."""
    matches = [
        (len(prefix), topic)
        for topic, (_, prefixes) in TOPICS.items()
        for prefix in prefixes
        if f"{name.defined_in}.".startswith(f"{prefix}.")
    ]
    return max(matches)[1]


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
    for topic, (title, _) in TOPICS.items():
        yield f"reference/{BY_TOPIC}.{topic}.md", "\n".join(_topic_page(topic, title))


def _page(module: str) -> Iterator[str]:
    yield f"# {module}\n"
    yield f"{MODULES[module]}\n"
    if module == BY_TOPIC:
        for topic, (title, _) in TOPICS.items():
            yield f"## {title[0].upper()}{title[1:]}\n"
            yield from _table(name for name in exports(module) if topic_of(name) == topic)
        return
    yield from _table(exports(module))
    yield from _entries(name for name in exports(module) if homes()[name.canonical] == page_of(module))


def _topic_page(topic: str, title: str) -> Iterator[str]:
    """The names of a topic that no other page describes."""
    yield f"# {BY_TOPIC}: {title}\n"
    yield f"All names, also those that other pages describe: [`{BY_TOPIC}`]({BY_TOPIC}.md).\n"
    page = f"reference/{BY_TOPIC}.{topic}.md"
    names = [name for name in exports(BY_TOPIC) if homes()[name.canonical] == page]
    yield from _table(names)
    yield from _entries(names)


def _table(names: Iterable[PublicName]) -> Iterator[str]:
    yield "| name | |"
    yield "|---|---|"
    for name in names:
        yield f"| [`{name.name}`][{name.canonical}] | {_first_line(name)} |"
    yield ""


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
        if name.name == "Accelerator":
            yield "      group_by_category: false"
            yield f"      members: [{', '.join(_members(name))}]"
        yield ""


def _members(name: PublicName) -> list[str]:
    """The members of a class in the order of its page: what is called most, other methods, attributes."""
    statement = defined_statement(name)
    assert isinstance(statement, ast.ClassDef)
    methods, attributes = [], []
    for node in statement.body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]
            is_attribute = not {"property", "cached_property", "setter"}.isdisjoint(decorators)
            (attributes if is_attribute else methods).append(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            attributes.append(node.target.id)
    ordered = dict.fromkeys((*FIRST, *methods, *attributes))
    return [member for member in ordered if not member.startswith("_") and member in (*methods, *attributes)]


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
        f"{name.path}: {homes()[name.canonical]} has no entry for {name.canonical}"
        for module in MODULES
        for name in exports(module)
        if name.canonical not in built.get(homes()[name.canonical], set())
    ]
