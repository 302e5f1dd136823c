"""Plants the defects of tests/planted/patches one by one, and sees whether the tests that each patch names notice it.

    uv run tools/dev.py planted            # all; writes the table into tests/planted/README.md
    uv run tools/dev.py planted A1 A6      # those whose names begin so

A patch makes of today's sources those with the defect. The lines before its first "diff --git" are comments: they say what
the defect does, and "# tests: path::name ..." names the tests. They run in a copy of the tree, whose packages are
imported instead of the installed ones, also by the processes that tests start.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "planted"
TABLE_BEGIN, TABLE_END = "<!-- table: begin -->", "<!-- table: end -->"
FAILED, SECONDS = 1, 600  # pytest's exit code when tests fail; the longest a run may take


@dataclass(frozen=True)
class Defect:
    """One patch.

    Attributes:
        name: The name of its file, which begins with the number of the review.
        what: What the defect does.
        tests: What must notice it, as pytest takes them.
        path: The patch.
    """

    name: str
    what: str
    tests: tuple[str, ...]
    path: Path

    @classmethod
    def read(cls, path: Path) -> Defect:
        """Read a patch.

        Raises:
            SystemExit: It names no test.
        """
        comments = []
        for line in path.read_text().splitlines():
            if line.startswith("diff --git"):
                break
            comments.append(line.removeprefix("#").strip())
        tests = [
            name for line in comments if line.startswith("tests:") for name in line.removeprefix("tests:").split()
        ]
        what = " ".join(line for line in comments if line and not line.startswith("tests:"))
        if not tests:
            raise SystemExit(f"{path} names no test that must notice it: add a line '# tests: path::name ...'")
        return cls(path.stem, what, tuple(tests), path)


@dataclass(frozen=True)
class Outcome:
    """What became of a planted defect."""

    defect: Defect
    verdict: str
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether the tests noticed it."""
        return self.verdict == "yes"

    def row(self) -> str:
        """A row of the table."""
        tests = "<br>".join(f"`{test}`" for test in self.defect.tests)
        return f"| {self.defect.name} | {self.defect.what} | {tests} | {self.verdict} | {self.seconds:.0f} |"


def copy_tree(folder: Path) -> Path:
    """All files that git knows or would take, as they are now."""
    copy = folder / "copy"
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT)
    for name in listed.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name)
    return copy


def environment(copy: Path) -> dict[str, str]:
    """One in which the copy's packages come before the installed ones."""
    sources = os.pathsep.join(str(path) for path in sorted(copy.glob("packages/*/src")))
    return {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def check_imports(copy: Path) -> None:
    """Make sure that it is the copy that is tested."""
    code = "import accelerate, accel_ops; print(accelerate.__file__, accel_ops.__file__)"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=copy, env=environment(copy), text=True).split()
    if not all(Path(path).is_relative_to(copy) for path in found):
        raise SystemExit(f"the packages are imported from {found}, not from {copy}")


def run_tests(copy: Path, tests: tuple[str, ...]) -> int:
    """Pytest's exit code; that of failed tests when they hang."""
    options = ["-x", "-q", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider", "--tb=no", "--no-header"]
    try:
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests], cwd=copy, env=environment(copy), check=False,
            timeout=SECONDS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        return FAILED


def apply(copy: Path, defect: Defect, *options: str) -> bool:
    """Whether the patch could be applied."""
    command = ["git", "apply", "--whitespace=nowarn", *options, str(defect.path)]
    return subprocess.run(command, cwd=copy, check=False).returncode == 0


def try_defect(copy: Path, defect: Defect) -> Outcome:
    """Plant it, run its tests, and take it out again."""
    begin = time.monotonic()
    if not apply(copy, defect):
        return Outcome(defect, "does not apply", 0.0)
    code = run_tests(copy, defect.tests)
    apply(copy, defect, "--reverse")
    verdict = {FAILED: "yes", 0: "NO"}.get(code, f"pytest could not run them (exit code {code})")
    return Outcome(defect, verdict, time.monotonic() - begin)


def write_table(outcomes: list[Outcome]) -> None:
    """Put the table into the README."""
    readme = FOLDER / "README.md"
    before, _, rest = readme.read_text().partition(TABLE_BEGIN)
    after = rest.partition(TABLE_END)[2]
    head = ["| patch | what it does | tests that must fail | noticed | seconds |", "|---|---|---|---|---|"]
    table = "\n".join([*head, *(outcome.row() for outcome in outcomes)])
    readme.write_text(f"{before}{TABLE_BEGIN}\n{table}\n{TABLE_END}{after}")


def main(arguments: list[str]) -> int:
    """Try the chosen defects; succeeds when all are noticed."""
    parser = argparse.ArgumentParser(
        prog="planted", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="ID", help="beginnings of names of patches; all of them when none")
    options = parser.parse_args(arguments)
    defects = [Defect.read(path) for path in sorted((FOLDER / "patches").glob("*.patch"))]
    chosen = [one for one in defects if not options.names or one.name.startswith(tuple(options.names))]
    if not chosen:
        raise SystemExit(f"no patch begins with {options.names}: there are {', '.join(one.name for one in defects)}")
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_tree(Path(folder))
        check_imports(copy)
        tests = tuple(dict.fromkeys(test for defect in chosen for test in defect.tests))
        code = run_tests(copy, tests)
        if code != 0:
            raise SystemExit(f"the tests fail without any defect (exit code {code}): {' '.join(tests)}")
        outcomes = []
        for defect in chosen:
            outcomes.append(try_defect(copy, defect))
            print(outcomes[-1].row(), flush=True)
    if not options.names:
        write_table(outcomes)
    print(f"{sum(one.is_good for one in outcomes)} of {len(outcomes)} are noticed")
    return int(not all(one.is_good for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
