#!/usr/bin/env python3
"""The released tests of accelerate 1.15, run on 1.15 and on this library: `uv run tools/dev.py released`.

Another project's tests say what its users rely on. They come with its source distribution, which is fetched into
`.venv-released` and is no part of this repository. What passes there has to pass here, but for what `DIFFERENT` names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-released"
RELEASE = "accelerate-1.15.0"
SAME_AS_HERE = ("torch", "numpy", "transformers")
NEEDED = (
    "pytest", "pytest-subtests", "pytest-timeout", "parameterized", "datasets", "evaluate", "rich", "scikit-learn", "scipy",
    "tensorboard", "timm", "torchdata", "torchvision", "tqdm",
)  # fmt: skip
FILE_SECONDS, TEST_SECONDS = 1200, 120

THE_WORDS = "it compares a whole message, and ours are in our own words"
THE_ORDER = "it compares the state dict with torchdata's, and ours also holds what the order was drawn from"
STATEFUL = "test_data_loader.StatefulDataLoaderTester.test_"
DIFFERENT = {
    "test_data_loader.DataLoaderTester.test_split_batches_validates_non_divisible_batch_size": THE_WORDS,
    **{
        f"{STATEFUL}{kind}_equivalent_to_torchdata_stateful_dataloader_num_workers_{workers}": THE_ORDER
        for kind in ("stateful_dataloader_adapter", "decoupled_stateful_dataloader_adapter")
        for workers in (0, 2)
    },
    "test_dataclasses.TestParallelismConfig.test_cp_torch_handler": THE_WORDS,
    "test_modeling_utils.ModelingUtilsTester.test_set_module_tensor_checks_shape": THE_WORDS,
    "test_utils.UtilsTester.test_honor_type": THE_WORDS,
}
"""Tests that pass on 1.15 and not here, with the reason."""
PROGRAMS = ("test_script", "test_sync", "test_ops")
"""Programs that 1.15 bundles for `accelerate test`; here they run in two processes."""


def main() -> int:
    """Fetch, run on both, compare."""
    theirs, ours = prepare()
    wrong: list[str] = []
    totals = {"1.15": 0, "here": 0}
    for file in sorted((FOLDER / RELEASE / "tests").glob("test_*.py")):
        passed_there, passed_here = passed(theirs, file), passed(ours, file)
        lost = passed_there - passed_here
        wrong += [name for name in sorted(lost) if name not in DIFFERENT]
        wrong += [f"{name} (which passes, and is named as different)" for name in sorted(passed_here & {*DIFFERENT})]
        totals = {"1.15": totals["1.15"] + len(passed_there), "here": totals["here"] + len(passed_here)}
        print(f"{file.stem:50} {len(passed_there):4} on 1.15 {len(passed_here):4} here {len(lost):3} lost", flush=True)
    for program in PROGRAMS:
        worked = run_program(ours, program)
        wrong += [] if worked else [program]
        print(f"{program:50} {'runs' if worked else 'FAILS'} in two processes", flush=True)
    print(f"Passed: {totals['1.15']} on 1.15, {totals['here']} here; {len(DIFFERENT)} differ on purpose.")
    print("\n".join(["Lost:", *wrong]) if wrong else "Nothing else is lost.")
    return 1 if wrong else 0


def prepare() -> tuple[Path, Path]:
    """The interpreters with 1.15 and with this workspace; environments and tests are made when they are missing."""
    packages = [part for folder in sorted((ROOT / "packages").iterdir()) for part in ("-e", str(folder))]
    theirs = environment("theirs", ["pip", RELEASE.replace("-", "==")])
    ours = environment("ours", packages)
    if not (FOLDER / RELEASE).exists():
        download = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(FOLDER)]
        subprocess.run([theirs, *download, RELEASE.replace("-", "==")], check=True)
        with tarfile.open(FOLDER / f"{RELEASE}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
    return theirs, ours


def environment(name: str, wanted: list[str]) -> Path:
    """An environment with what the tests need; the path of its interpreter."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(FOLDER / name)], check=True)
        pins = [f"{library}=={version(library)}" for library in SAME_AS_HERE]
        subprocess.run(["uv", "pip", "install", "-q", "-p", str(python), *wanted, *pins, *NEEDED], check=True)
    return python


def passed(python: Path, file: Path) -> set[str]:
    """Names of the tests of a file that pass with an interpreter; without the Hub, as this has to work offline."""
    report = FOLDER / f"{file.stem}.xml"
    report.unlink(missing_ok=True)
    plain = FOLDER / "pytest.ini"  # that of the distribution is for its own developers
    plain.write_text("[pytest]\n")
    command = [str(python), "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", "-c", str(plain)]
    command += [f"--timeout={TEST_SECONDS}", f"--junitxml={report}"]
    with open(FOLDER / f"{file.stem}-{python.parents[1].name}.log", "w") as log:
        try:
            subprocess.run(
                command,
                cwd=FOLDER, env=variables(), stdout=log, stderr=log, timeout=FILE_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            log.write(f"Not done after {FILE_SECONDS} seconds.\n")
    return set(names_of_passed(report)) if report.exists() else set()


def names_of_passed(report: Path) -> Iterator[str]:
    """The tests of a report that have neither failed nor been skipped."""
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(child.tag in ("failure", "error", "skipped") for child in case):
            place = case.get("classname", "").partition("test_")
            yield f"{place[1]}{place[2]}.{case.get('name')}"


def run_program(python: Path, program: str) -> bool:
    """Launch a bundled program on two processes of this machine's CPU."""
    path = FOLDER / RELEASE / "src" / "accelerate" / "test_utils" / "scripts" / f"{program}.py"
    command = [str(python.parent / "accelerate"), "launch", "--cpu", "--num_processes", "2", str(path)]
    with open(FOLDER / f"{program}.log", "w") as log:
        done = subprocess.run(
            command, cwd=FOLDER, env=variables(), stdout=log, stderr=log, timeout=FILE_SECONDS, check=False
        )
    return done.returncode == 0


def variables() -> dict[str, str]:
    """What the tests see of this machine."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(FOLDER / "home"), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
