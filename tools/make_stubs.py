#!/usr/bin/env python3
"""Write the `.pyi` beside the umbrella's two lazy packages, from the tables in them: `uv run tools/dev.py stubs`.

Type checkers and editors do not run `__getattr__`; the stub spells out what it would return. `--check` writes nothing
and fails when a stub is stale.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

UMBRELLA = Path(__file__).resolve().parents[1] / "packages" / "accelerate" / "src" / "accelerate"
LAZY_PACKAGES = {"accelerate": UMBRELLA / "__init__.py", "accelerate.utils": UMBRELLA / "utils" / "__init__.py"}


def make_stub(source: str, package: str) -> str:
    """The stub of a package whose `__init__.py` holds the table `EXPORTS` and perhaps `SUBMODULES`."""
    tree = ast.parse(source)
    lines = [f'"""{ast.get_docstring(tree)}"""', ""]
    constants = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.asname == alias.name for alias in node.names):
            lines += [f"from {node.module} import {alias.name} as {alias.name}" for alias in node.names]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if name == "EXPORTS":
                lines += _imports(ast.literal_eval(value))
            elif name == "SUBMODULES":
                lines += [f"from {package} import {module} as {module}" for module in ast.literal_eval(value)]
            elif isinstance(value, ast.Constant):
                constants.append(f"{name}: {type(value.value).__name__}")
    head, imports = lines[:2], sorted(set(lines[2:]))
    return "\n".join([*head, *imports, *(["", *constants] if constants else []), ""])


def _imports(table: dict[str, str]) -> list[str]:
    found = []
    for module, names in table.items():
        for entry in names.split():
            name, _, origin = entry.partition("=")
            found.append(f"from {module} import {origin or name} as {name}")
    return found


def stale() -> dict[Path, str]:
    """The stubs that do not say what their table says, with what they should say."""
    wanted = {path.with_suffix(".pyi"): make_stub(path.read_text(), name) for name, path in LAZY_PACKAGES.items()}
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a stub is stale")
    check = parser.parse_args().check
    found = stale()
    for stub, text in found.items():
        if not check:
            stub.write_text(text)
        print(stub.relative_to(UMBRELLA.parents[3]), "is stale" if check else "written")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
