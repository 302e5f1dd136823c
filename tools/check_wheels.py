#!/usr/bin/env python3
"""Build every package and use it as a stranger would: alone, from its wheel, in an empty environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def readme_example(package: Path) -> str:
    """The first Python block of a package's README."""
    found = re.search(r"```python\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)
    if found is None:
        raise SystemExit(f"{package.name}: README.md has no Python example")
    return found.group(1)


def try_alone(package: Path, wheels: Path, folder: Path) -> None:
    """Install one wheel with only what it declares, import it and run its README example."""
    environment = folder / package.name
    subprocess.run(["uv", "venv", "-q", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = ["uv", "pip", "install", "-q", "--python", str(python), "--find-links", str(wheels)]
    constraint = folder / "constraints.txt"
    constraint.write_text("torch>=2.13,<2.14\n")
    subprocess.run([*install, "-c", str(constraint), package.name.replace("_", "-")], check=True)
    script = folder / f"{package.name}_example.py"
    script.write_text(readme_example(package))
    subprocess.run([str(python), "-W", "error::DeprecationWarning", str(script)], check=True, cwd=folder)
    print(f"{package.name}: installs alone, its README example runs", flush=True)


def main() -> int:
    """Build, then try the packages named on the command line (all when none is)."""
    wanted = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = folder / "wheels"
        subprocess.run(
            ["uv", "build", "-q", "--all-packages", "--wheel", "--no-sources", "-o", str(wheels)], cwd=ROOT, check=True
        )
        for package in PACKAGES:
            if not wanted or package.name in wanted:
                try_alone(package, wheels, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
