"""Run the tests with several versions of torch and Python, each pair in an environment of its own.

    uv run tools/dev.py matrix                        # all pairs
    uv run tools/dev.py matrix --corners              # the two ends
    uv run tools/dev.py matrix --cell 2.9-3.11 tests/ops -x  # one pair; the rest goes to pytest

`--write` puts what the tests said into `docs/compatibility.md`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.environments import install, make_environment  # noqa: E402 - found only from here on

TORCH = ("2.9", "2.11", "2.13", "newest")
PYTHON = ("3.11", "3.13")
PAIRS = (*((torch, python) for torch in TORCH for python in PYTHON), ("newest", "3.14"))
CORNERS = ((TORCH[0], PYTHON[0]), (TORCH[-1], PYTHON[-1]))
NOT_TRIED = (
    "clients",
    "examples",
    "tracking/services",
    "differential",
    "packaging",
    "gpu",
    "clusters",
)  # libraries that are not installed
PAGE = ROOT / "docs" / "compatibility.md"
BLOCK = re.compile(r"(<!-- matrix -->\n).*?(<!-- /matrix -->)", re.DOTALL)


@dataclass(frozen=True)
class Cell:
    """A version of torch (`"2.9"`: the last 2.9.x; `"newest"`: whatever pip would install) and one of Python."""

    torch: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read `2.9-3.11`."""
        torch, _, python = text.partition("-")
        if not re.fullmatch(r"newest|\d+\.\d+(\.\d+)?", torch) or not re.fullmatch(r"\d+\.\d+", python):
            raise argparse.ArgumentTypeError(f"{text!r} is not TORCH-PYTHON, as 2.9-3.11 or newest-3.13")
        return cls(torch, python)

    @property
    def folder(self) -> Path:
        """Where its environment is."""
        return ROOT / f".venv-torch{self.torch}-py{self.python}"

    @property
    def executable(self) -> Path:
        """The Python of its environment."""
        return self.folder / "bin" / "python"

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return "torch" if self.torch == "newest" else f"torch=={self.torch}.*"


@dataclass(frozen=True)
class Outcome:
    """What the tests of a cell said.

    Args:
        cell: The cell.
        versions: Of torch and Python, as installed; empty when they could not be.
        passed: How many tests passed.
        failed: How many failed or could not be run.
        skipped: How many were skipped.
        code: The exit code of pytest, or of what came before it.
    """

    cell: Cell
    versions: tuple[str, str] | tuple[()]
    passed: int
    failed: int
    skipped: int
    code: int

    def row(self) -> str:
        """One line of a table."""
        torch, python = self.versions or (self.cell.torch, self.cell.python)
        return f"| {torch} | {python} | {self.passed} | {self.skipped} | {self.failed} |"


def install_cell(cell: Cell) -> None:
    """Make the environment of a cell anew, with all packages, what tests need, and nothing of the lock."""
    print(f"{cell.folder.name}: installing", flush=True)
    python = make_environment(cell.folder, python=cell.python, path=_pythons_of_pyenv(cell.python))
    packages = [word for path in sorted(ROOT.glob("packages/*")) for word in ("-e", str(path))]
    groups = ("--group", "dev", "--group", "examples", "setuptools")  # torch.compile of 2.9 imports the last one
    # without the settings of the workspace, which hold torch at the version of the lock
    install(python, "--no-config", *packages, *groups, cell.requirement, cwd=ROOT)


def _pythons_of_pyenv(version: str) -> list[str]:
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    return [str(folder) for folder in sorted(root.glob(f"versions/{version}.*/bin"))]


def try_cell(cell: Cell, arguments: list[str]) -> Outcome:
    """Install a cell and run the tests in it."""
    try:
        install_cell(cell)
    except subprocess.CalledProcessError as error:
        return Outcome(cell, (), 0, 0, 0, error.returncode)
    ask = "import torch, platform; print(torch.__version__.partition('+')[0], platform.python_version())"
    torch, python = subprocess.check_output([cell.executable, "-c", ask], text=True).split()
    ignored = [f"--ignore=tests/{folder}" for folder in NOT_TRIED]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(cell.executable), "-m", "pytest", *ignored, f"--junit-xml={report}", *arguments]
        print("$", " ".join(command), flush=True)
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": ""}, check=False
        )
        suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
    if suite is None:
        return Outcome(cell, (torch, python), 0, 0, 0, done.returncode or 1)
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - failed - skipped
    return Outcome(cell, (torch, python), passed, failed, skipped, done.returncode)


def table(outcomes: list[Outcome]) -> str:
    """What all cells said."""
    lines = ["| torch | Python | passed | skipped | failed |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(outcome.row() for outcome in outcomes)]) + "\n"


def main(arguments: list[str]) -> int:
    """Try the chosen cells; the exit code says whether all of them passed."""
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corners", action="store_true", help="lowest torch and Python, newest torch and Python")
    parser.add_argument(
        "--cell", type=Cell.parse, action="append", metavar="TORCH-PYTHON", help="only this; repeatable"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/compatibility.md")
    options, rest = parser.parse_known_args(arguments)
    pairs = CORNERS if options.corners else PAIRS
    outcomes = [try_cell(cell, rest) for cell in options.cell or [Cell(*pair) for pair in pairs]]
    shown = table(outcomes)
    print(shown)
    if options.write:
        PAGE.write_text(BLOCK.sub(lambda found: found[1] + shown + found[2], PAGE.read_text()))
    return int(any(outcome.code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
