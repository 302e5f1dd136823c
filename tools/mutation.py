"""What a short run of the tests still catches of what all tests catch, by planted mistakes (cosmic-ray).

    uv run tools/dev.py mutation                         # twenty mistakes in each of state, ops and data
    uv run tools/dev.py mutation accel-ops --number 50 --seed 3

A sample of all mistakes that cosmic-ray knows is planted one by one into a clone of the last commit, and the package's own
tests are run: first as a short run takes them, then, where that noticed nothing, all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("accel-state", "accel-ops", "accel-data")
TOOL = ("uvx", "--from", "cosmic-ray==8.7.0", "cosmic-ray")
WITHOUT_EFFECT = ("BitOr", "ReplaceComparisonOperator_Is_Eq", "RemoveDecorator")  # annotations; the same for None
SECONDS = 600  # of a run; longer means that a mistake made it hang


@dataclass(frozen=True)
class Mistake:
    """One change of the sources, as cosmic-ray names it."""

    module: str
    operator: str
    occurrence: int
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.operator.removeprefix('core/')}"


def clone(folder: Path) -> Path:
    """The last commit, in a folder of its own."""
    copy = folder / "copy"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    return copy


def mistakes(copy: Path, package: str) -> list[Mistake]:
    """All that can be planted into a package and would change what it does."""
    config, session = copy / "mutation.toml", copy / "mutation.sqlite"
    session.unlink(missing_ok=True)
    source = f"packages/{package}/src/{package.replace('-', '_')}"
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "{source}"\ntimeout = 1\nexcluded-modules = []\ntest-command = "true"\n\n'
        '[cosmic-ray.distributor]\nname = "local"\n'
    )
    subprocess.run([*TOOL, "init", config.name, session.name], cwd=copy, check=True)
    dumped = subprocess.check_output([*TOOL, "dump", session.name], cwd=copy, text=True)
    found = []
    for line in dumped.splitlines():
        item: dict[str, Any] = json.loads(line)[0]
        for change in item["mutations"]:
            if any(name in change["operator_name"] for name in WITHOUT_EFFECT):
                continue
            where = change["module_path"], change["operator_name"], change["occurrence"], change["start_pos"][0]
            found.append(Mistake(*where))
    return found


def plant(copy: Path, mistake: Mistake) -> str:
    """Change the sources; returns the difference."""
    subprocess.run([*TOOL, "apply", mistake.module, mistake.operator, str(mistake.occurrence)], cwd=copy, check=True)
    return subprocess.check_output(["git", "diff", "-U0", "--", "packages"], cwd=copy, text=True)


def is_noticed(copy: Path, package: str, length: str) -> bool:
    """Whether the package's tests fail; `length` is `--short` or `--all`."""
    sources = os.pathsep.join(str(path) for path in sorted(copy.glob("packages/*/src")))
    command = [
        sys.executable, "-m", "pytest", f"tests/{package.removeprefix('accel-')}", length, "-x", "-q", "-p", "no:randomly",
        "-p", "no:cacheprovider",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=copy, check=False, timeout=SECONDS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def try_package(copy: Path, package: str, number: int, seed: int) -> tuple[int, int]:
    """Plant a sample; how many mistakes a short run noticed, and how many all tests."""
    if is_noticed(copy, package, "--all"):
        raise SystemExit(f"{package}: its tests fail without any mistake")
    every = mistakes(copy, package)
    short = whole = 0
    for mistake in random.Random(seed).sample(every, number):
        difference = plant(copy, mistake)
        by_short = is_noticed(copy, package, "--short")
        by_all = by_short or is_noticed(copy, package, "--all")
        short, whole = short + by_short, whole + by_all
        verdict = "short" if by_short else "all" if by_all else "not noticed"
        print(f"{verdict:11}  {mistake}", flush=True)
        if not by_short:
            print("\n".join(line for line in difference.splitlines()[4:] if line[:1] in "+-"))
        subprocess.run(["git", "checkout", "-q", "--", "packages"], cwd=copy, check=True)
    print(f"{package}: {short} by a short run, {whole} by all tests, of {number} out of {len(every)}\n")
    return short, whole


def main(arguments: list[str]) -> int:
    """Try the chosen packages; succeeds when a short run notices nine of ten."""
    parser = argparse.ArgumentParser(
        prog="mutation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("packages", nargs="*", default=PACKAGES, metavar="PACKAGE", help="for example accel-ops")
    parser.add_argument("--number", type=int, default=20, help="of mistakes in each package")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        copy = clone(Path(folder))
        found = [try_package(copy, package, options.number, options.seed) for package in options.packages]
    short, whole = (sum(counts) for counts in zip(*found, strict=True))
    print(f"a short run notices {short} of the {whole} that all tests notice")
    return int(short < 0.9 * whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
