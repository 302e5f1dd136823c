"""The figures of one GPU: training steps, waits, memory, offloaded weights, loading, checkpoints, FSDP 2, a compiled Llama.

    python -m tools.bench.gpu                                  # about three minutes of one H100 or H200
    python -m tools.bench.gpu --reference PYTHON_OR_FOLDER     # accelerate 1.15 beside it, which takes as long again
    python -m tools.bench.gpu --parts loader loading           # some of it
    python -m tools.bench.gpu --tiny                           # the same code on the CPU, to try it

Each library is measured in processes of its own (`gpu_worker.py`), by the same code, and each figure beside its floor in the
same process. The table is written again after each part, so that a run that is cut leaves what was measured. A figure that
could not be taken has a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

import torch

from tools.bench.gpu_measure import Figure, Scale
from tools.bench.gpu_worker import MARK, PARTS
from tools.bench.row import Row, table

ROOT = Path(__file__).resolve().parents[2]
WORKER = "tools.bench.gpu_worker"
START_SECONDS = 10  # which a process may take before it measures anything


@dataclass
class Measured:
    """What has been measured of one library so far."""

    figures: dict[str, dict[str, Figure]] = field(default_factory=dict)
    """Of each part that has ended or begun, by their keys."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a part has not all of its figures."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The library, and the speed of the bus."""

    def add(self, part: str | None, message: dict[str, Any]) -> None:
        """Note what a process says, of a part or of itself."""
        if part is None:
            self.facts |= message
        elif "begins" in message:
            self.figures[part] = {}
        elif "figure" in message:
            figure = Figure(**message["figure"])
            self.figures[part][figure.key] = figure
        elif "failed" in message:
            self.failures[part] = message["failed"]


@dataclass(frozen=True)
class Library:
    """A library to measure.

    Attributes:
        scale: Where and how large.
        python: The interpreter.
        environment: Its environment variables.
    """

    scale: Scale
    python: str
    environment: Mapping[str, str]

    def measure(self, parts: list[str], measured: Measured, end: float) -> Iterator[None]:
        """Take figures in a process, and in another one where that ends early; yields whenever there is something new."""
        remaining = list(parts)
        while remaining:
            seconds = end - time.monotonic()
            if seconds < START_SECONDS:
                measured.failures |= dict.fromkeys(remaining, "no time left")
                break
            command = [self.python, "-m", WORKER, json.dumps(asdict(self.scale)), str(seconds), *remaining]
            current = None
            with subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, text=True
            ) as process:
                for line in process.stdout or ():
                    if line.startswith(MARK):
                        message = json.loads(line.removeprefix(MARK))
                        current = message.get("begins", current)
                        measured.add(current, message)
                        yield
            if process.returncode == 0:
                break
            why = f"the process ended with {process.returncode}"
            if current is None:  # it could not even begin, and another one could not either
                measured.failures |= dict.fromkeys(remaining, why)
                break
            measured.failures[current] = f"{why}; the limit is {PARTS[current].seconds} s"
            remaining = remaining[remaining.index(current) + 1 :]
        yield


def environment_for(folder: str | None, *, is_ours: bool, has_group: bool) -> dict[str, str]:
    """The environment of a process that measures.

    Args:
        folder: A folder that comes first where libraries are looked for.
        is_ours: Whether this library is measured; else its packages are hidden.
        has_group: Whether the process is the only rank of a group, as torchrun starts it.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if not is_ours and folder is None:  # a folder that comes first hides what others have
        paths = [path for path in paths if not holds_ours(Path(path))]
    first = [str(ROOT)] if folder is None else [folder, str(ROOT)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": os.pathsep.join([*first, *paths]), "HF_HUB_OFFLINE": "1"}
    if has_group:
        values = ("0", "1", "0", "1", "127.0.0.1", str(free_port()))
        environment |= dict(zip(names, values, strict=True))
    return environment


def holds_ours(folder: Path) -> bool:
    """Whether this library would be imported from a folder."""
    return folder.resolve().is_relative_to(ROOT / "packages") or any(folder.glob("accel_*"))


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rows(ours: Measured, reference: Measured | None) -> list[Row]:
    """The rows of what has been measured so far."""
    made = []
    for part in PARTS:
        for key, figure in ours.figures.get(part, {}).items():
            made.append(
                Row(
                    figure.what, figure.unit, figure.value, reference_cell(reference, part, key), figure.floor,
                    figure.result, figure.goal, figure.result_unit, figure.spread,
                )
            )  # fmt: skip
        if part in ours.failures:
            made.append(Row(f"{part}, what is missing of it", "", ours.failures[part], None, None, None, None))
    return made


def reference_cell(reference: Measured | None, part: str, key: str) -> float | str | None:
    """What stands in the column of accelerate 1.15: its figure, or why there is none."""
    if reference is None:
        return "not installed"
    if key in reference.figures.get(part, {}):
        return reference.figures[part][key].value
    return reference.failures.get(part, "not measured")


def page(title: str, ours: Measured, reference: Measured | None) -> str:
    """The table with what must be known about it."""
    lines = [title, "", table(rows(ours, reference)), ""]
    for measured in (ours, reference):
        if measured is not None and "library" in measured.facts:
            lines.append(f"- {measured.facts['library']}")
    if "bus" in ours.facts:
        lines.append(f"- bus: {ours.facts['bus'] / 1e9:.1f} GB/s from pinned memory to the GPU")
    return "\n".join(lines) + "\n"


def measure_all(
    scale: Scale, parts: list[str], reference: str | None, seconds: float, show: Any
) -> tuple[Measured, Measured | None]:
    """Measure both libraries, this one first.

    Args:
        scale: Where and how large.
        parts: Names from `PARTS`, in its order.
        reference: An interpreter that has accelerate 1.15, or a folder with it.
        seconds: After which no further part begins.
        show: Called with both results whenever there is something new.
    """
    end = time.monotonic() + seconds
    ours, theirs = Measured(), None if reference is None else Measured()
    groups = {kind: [name for name in parts if PARTS[name].has_group == kind] for kind in (False, True)}
    for measured in (ours, theirs):
        if measured is None:
            continue
        is_ours = measured is ours
        folder = reference if not is_ours and Path(str(reference)).is_dir() else None
        python = sys.executable if is_ours or folder is not None else str(reference)
        for has_group in (True, False):  # compiling comes last
            environment = environment_for(folder, is_ours=is_ours, has_group=has_group)
            library = Library(Scale(scale.device, scale.tiny, is_ours), python, environment)
            for _ in library.measure(groups[has_group], measured, end):
                show(ours, theirs)
    return ours, theirs


def main(arguments: list[str]) -> int:
    """Print the table; 1 when a goal was missed or a figure of this library could not be taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="try the code on the CPU")
    parser.add_argument("--reference", metavar="PYTHON_OR_FOLDER", help="where accelerate 1.15 is installed")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the table to this file, as it grows")
    parser.add_argument("--seconds", type=float, default=300, help="start nothing later than this (default 300)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    options = parser.parse_args(arguments)
    reference_exists = options.reference is None or Path(options.reference).is_dir() or which(options.reference)
    if not reference_exists:
        parser.error(f"--reference {options.reference}: neither a folder nor an interpreter")
    name = "the CPU: these figures mean nothing" if options.tiny else torch.cuda.get_device_name(0)
    title = f"On {name}, torch {torch.__version__}, Python {sys.version.split()[0]}."
    shown: set[str] = set()

    def show(ours: Measured, reference: Measured | None) -> None:
        for row in rows(ours, reference):
            if row.what not in shown:
                shown.add(row.what)
                print(" | ".join(row.cells()), file=sys.stderr, flush=True)
        if options.output is not None:
            options.output.write_text(page(title, ours, reference))

    scale = Scale("cpu" if options.tiny else "cuda", options.tiny)
    parts = [name for name in PARTS if name in options.parts]
    ours, reference = measure_all(scale, parts, options.reference, options.seconds, show)
    print(page(title, ours, reference), end="")
    if options.tiny:
        return int(bool(ours.failures))
    return int(bool(ours.failures) or not all(row.met for row in rows(ours, reference)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
