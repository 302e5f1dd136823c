#!/usr/bin/env python3
"""Build every package and use it as a stranger would: alone, from its wheel, in an empty environment.

Each is built twice, to the same bytes, and PyPI would take it (`tools.release.build`).
The umbrella must also be what other libraries mean when they ask for accelerate.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.environments import install, make_environment  # noqa: E402 - found only from here on
from tools.release import RefusedError, Workspace, build  # noqa: E402

TORCH = "torch>=2.13,<2.14"  # of the workspace
CLIENTS = ("transformers[torch]", "peft")
WITH_PROGRAMS = ("accel-cli", "accelerate")
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def readme_example(package: Path) -> str:
    """The first Python block of a package's README."""
    found = re.search(r"```python\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)
    if found is None:
        raise SystemExit(f"{package.name}: README.md has no Python example")
    return found.group(1)


def build_wheel(package: Path, wheels: Path, folder: Path) -> None:
    """Build a package as a release does, and put its wheel beside the others."""
    try:
        built = build(Workspace(ROOT), package.name, folder / f"{package.name}-built")
    except RefusedError as error:
        raise SystemExit(str(error)) from None
    for file in built:
        if file.suffix == ".whl":
            shutil.copy2(file, wheels)


def try_alone(package: Path, wheels: Path, folder: Path) -> None:
    """Install one wheel with only what it declares, import it and run its README example."""
    python = make_environment(folder / package.name)
    install(python, package.name, TORCH, wheels=wheels)
    subprocess.run([str(python), "-c", f"import {package.name.replace('-', '_')}"], check=True, cwd=folder)
    script = folder / f"{package.name}_example.py"
    script.write_text(readme_example(package))
    shown = subprocess.check_output([str(python), "-W", "error", str(script)], cwd=folder, text=True)
    if not shown.strip():
        raise SystemExit(f"{package.name}: the example of README.md prints nothing")
    for program in sorted(python.parent.glob("accelerate*")):
        subprocess.run([str(program), "--help"], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    if package.name in WITH_PROGRAMS:
        run_program(python, folder)
    print(f"{package.name}: installs alone, its README example runs", flush=True)


def run_program(python: Path, folder: Path) -> None:
    """Run the program `accelerate` by its name and as a module: both launch a script."""
    (folder / "train.py").write_text("print('ran')")
    for program in ([str(python.parent / "accelerate")], [str(python), "-m", "accel_cli"]):
        subprocess.run([*program, "--version"], check=True, cwd=folder)
        done = subprocess.run(
            [*program, "launch", "--cpu", "train.py"], check=True, cwd=folder, stdout=subprocess.PIPE, text=True
        )
        if done.stdout != "ran\n":
            raise SystemExit(f"{' '.join(program)} launched a script that printed {done.stdout!r}")


def try_with_clients(wheels: Path, folder: Path) -> None:
    """Install libraries that ask for accelerate: they get ours, no requirement is left open, and they import."""
    python = make_environment(folder / "clients")
    install(python, *CLIENTS, TORCH, wheels=wheels)
    shown = subprocess.run(
        [str(python), "-c", "import accelerate, peft, transformers; print(accelerate.__version__)"],
        check=True, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    built = next(wheels.glob("accelerate-*.whl")).name.split("-")[1]
    if shown.stdout.strip() != built:
        raise SystemExit(f"{' and '.join(CLIENTS)} were installed with accelerate {shown.stdout.strip()}, not {built}")
    subprocess.run(["uv", "pip", "check", "-q", "--python", str(python)], check=True)
    print(f"accelerate: {' and '.join(CLIENTS)} install with it", flush=True)


def main() -> int:
    """Build, then try the packages named on the command line (all when none is)."""
    wanted = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = folder / "wheels"
        wheels.mkdir()
        for package in PACKAGES:
            build_wheel(package, wheels, folder)
        for package in PACKAGES:
            if not wanted or package.name in wanted:
                try_alone(package, wheels, folder)
        if not wanted or "accelerate" in wanted:
            try_with_clients(wheels, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
