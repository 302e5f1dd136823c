#!/usr/bin/env python3
"""Compare what packages ask of their siblings with the versions in this workspace.

Inside a workspace uv links members whatever their versions are, so a bound that no longer holds would be found only
by people who install the published wheels.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PACKAGES = Path(__file__).resolve().parents[1] / "packages"


def problems(projects: dict[str, dict[str, object]]) -> list[str]:
    """One line for each requirement that a sibling's version does not meet, or that has no upper bound."""
    found = []
    for name, project in projects.items():
        for text in project["dependencies"]:  # type: ignore[attr-defined]
            requirement = Requirement(text)
            sibling = projects.get(requirement.name)
            if sibling is None:
                continue
            if not requirement.specifier.contains(str(sibling["version"]), prereleases=True):
                found.append(f"{name} needs {text}, but the workspace has {requirement.name} {sibling['version']}")
            if not any(bound.operator in ("<", "<=", "~=", "==") for bound in requirement.specifier):
                found.append(f"{name} needs {text}: a sibling needs an upper bound")
    return found


def main() -> int:
    """Print the problems; exit status 1 when there are any."""
    files = sorted(PACKAGES.glob("*/pyproject.toml"))
    projects = {path.parent.name: tomllib.loads(path.read_text())["project"] for path in files}
    found = problems(projects)
    print("\n".join(found) or f"{len(projects)} packages agree on their versions")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
