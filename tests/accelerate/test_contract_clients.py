"""Everything that installed libraries import from here, read from an accelerator, or pass by keyword, is there.

Their sources are read, not run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate.hooks
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig

# library -> at least so many different names are found in it
LIBRARIES = {
    "datasets": 0, "deepspeed": 0, "diffusers": 15, "peft": 10, "sentence_transformers": 3, "timm": 0,
    "transformers": 60, "trl": 30,
}  # fmt: skip
DEEPSPEED = "state.deepspeed_plugin."
NO_ACCELERATORS = {"deepspeed", "datasets"}  # they call a device's driver by that name
ACCELERATOR = {"accelerator", "_accelerator"}
MAY_USE = re.compile(r"\b(?:from|import) accelerate\b|_hf_hook|accelerator\s*\.")
OF_DEVICES = {"type"}  # of what torch calls an accelerator
HOOKS = (
    accelerate.hooks.AlignDevicesHook(),
    accelerate.hooks.CpuOffload("cpu"),
    accelerate.hooks.SequentialHook(),
)


@dataclass
class Uses:
    """What a library uses, each with the places where it does."""

    imported: dict[tuple[str, str], str] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    hooks: dict[str, str] = field(default_factory=dict)
    keywords: dict[tuple[str, str], str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.imported) + len(self.read) + len(self.hooks) + len(self.keywords)


def names_of(node: ast.AST) -> list[str]:
    """`["self", "accelerator", "state"]` of the expression `self.accelerator.state`; empty for others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def after_accelerator(node: ast.AST) -> str:
    """What is read from an accelerator: `"state.fsdp_plugin"` of `trainer.accelerator.state.fsdp_plugin`."""
    names = names_of(node)
    at = next((index for index, name in enumerate(names[:-1]) if name in ACCELERATOR), None)
    if at is None or names[0] == "torch" or (at == 0 and names[1] in OF_DEVICES):
        return ""
    return ".".join(names[at + 1 :])


@cache
def uses_of(library: str) -> Uses:
    """Read all sources of a library."""
    uses = Uses()
    spec = find_spec(library)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(errors="replace")
        if MAY_USE.search(text):  # parsing takes long
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of their backslashes
                tree = ast.parse(text)
            collect(tree, str(path.relative_to(folder.parent)), uses, library not in NO_ACCELERATORS)
    return uses


def collect(tree: ast.AST, path: str, uses: Uses, has_accelerators: bool) -> None:
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node):
            assert node.module is not None
            for alias in node.names:
                imported[alias.asname or alias.name] = (node.module, alias.name)
                uses.imported[node.module, alias.name] = f"{path}:{node.lineno}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "accelerate":
                    uses.imported[alias.name, ""] = f"{path}:{node.lineno}"
        elif isinstance(node, ast.Attribute):
            where, names = f"{path}:{node.lineno}", names_of(node)
            if names[:1] == ["accelerate"] and ("accelerate", "") in uses.imported:
                uses.imported["accelerate", ".".join(names[1:])] = where
            if has_accelerators and (name := after_accelerator(node)):
                uses.read[name] = where
            if "_hf_hook" in names[:-1]:
                uses.hooks[names[names.index("_hf_hook") + 1]] = where
        elif isinstance(node, ast.Call):
            names = names_of(node.func)
            target = ".".join(imported[names[0]]) if len(names) == 1 and names[0] in imported else ""
            if not target and has_accelerators and (method := after_accelerator(node.func)):
                target = f"Accelerator.{method}"
            for keyword in node.keywords:
                if target and keyword.arg:
                    uses.keywords[target, keyword.arg] = f"{path}:{node.lineno}"


def is_ours(node: ast.ImportFrom) -> bool:
    return node.level == 0 and node.module is not None and node.module.split(".")[0] == "accelerate"


@pytest.fixture(params=LIBRARIES)
def uses(request: pytest.FixtureRequest) -> Uses:
    if find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return uses_of(request.param)


@pytest.mark.sample(3)
@pytest.mark.parametrize("library", LIBRARIES)
def test_names_are_found_in_the_library(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    assert len(uses_of(library)) >= LIBRARIES[library]


@pytest.mark.takes_turns
def test_all_imports_can_be_made(uses: Uses) -> None:
    assert list(missing_imports(uses)) == []


def missing_imports(uses: Uses) -> Iterator[str]:
    for (module, name), where in uses.imported.items():
        try:
            found(module, name)
        except (AttributeError, ImportError) as error:
            yield f"{where}: {error}"


def found(module: str, name: str) -> Any:
    """What `from module import name` gives; `name` may have dots, and be empty."""
    value: Any = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(f"{value.__name__}.{part}")
    return value


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """An accelerator that has everything one may have."""
    monkeypatch.setattr("accel_state.libraries.is_deepspeed_available", lambda: True)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)  # type: ignore[assignment]
    monkeypatch.setitem(accelerator.state.__dict__, "fsdp_plugin", FullyShardedDataParallelPlugin())
    monkeypatch.setitem(accelerator.state.__dict__, "parallelism_config", ParallelismConfig())
    return accelerator


@pytest.mark.takes_turns
def test_all_attributes_can_be_read(uses: Uses, accelerator: Accelerator) -> None:
    assert list(missing_attributes(uses, accelerator)) == []


def missing_attributes(uses: Uses, accelerator: Accelerator) -> Iterator[str]:
    plugin = DeepSpeedPlugin()
    for name, where in uses.read.items():
        owner, rest = (plugin, name[len(DEEPSPEED) :]) if name.startswith(DEEPSPEED) else (accelerator, name)
        if rest.startswith("hf_ds_config."):  # transformers puts an object of its own there
            continue
        try:
            read(owner, rest)
        except AttributeError as error:
            yield f"{where}: {name}: {error}"


def read(value: Any, names: str) -> Any:
    for name in names.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.takes_turns
def test_hooks_have_what_is_read_from_them(uses: Uses) -> None:
    missing = {name: where for name, where in uses.hooks.items() if not any(hasattr(hook, name) for hook in HOOKS)}
    assert missing == {}


@pytest.mark.takes_turns
def test_keywords_are_accepted(uses: Uses, accelerator: Accelerator) -> None:
    assert list(refused_keywords(uses, accelerator)) == []


def refused_keywords(uses: Uses, accelerator: Accelerator) -> Iterator[str]:
    for (target, keyword), where in uses.keywords.items():
        owner, _, name = target.partition(".") if target.startswith("Accelerator.") else target.rpartition(".")
        function = read(accelerator, name) if owner == "Accelerator" else found(owner, name)
        parameters = inspect.signature(function).parameters
        if keyword not in parameters and not any(row.kind is row.VAR_KEYWORD for row in parameters.values()):
            yield f"{where}: {target}({keyword}=)"


def test_what_is_not_there_is_found(accelerator: Accelerator) -> None:
    uses = Uses()
    program = """
import accelerate
from accelerate import dispatch_model
from accelerate.utils import no_function
accelerate.hooks.NoHook
self.accelerator.state.no_attribute
torch.accelerator.is_available()
dispatch_model(no_keyword=1)
model._hf_hook.no_attribute_of_hooks
accelerator.prepare(no_keyword=2)
"""
    collect(ast.parse(program), "a.py", uses, has_accelerators=True)
    assert sorted(line.partition(": ")[0] for line in missing_imports(uses)) == ["a.py:4", "a.py:5"]
    assert [line.partition(": ")[0] for line in missing_attributes(uses, accelerator)] == ["a.py:6"]
    assert uses.hooks == {"no_attribute_of_hooks": "a.py:9"}
    assert [line.partition(": ")[0] for line in refused_keywords(uses, accelerator)] == ["a.py:8", "a.py:10"]
