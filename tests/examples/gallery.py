"""The part of docs/examples.md that shows what each example prints; `python -m tests.examples.gallery` writes it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.examples.launched import Run, launch
from tests.examples.test_running import DEEPSPEED, GROUPS, MESHES_OF_TWO, write_inputs

PAGE = Path(__file__).parents[2] / "docs" / "examples.md"
HEADING = "## What each prints"
LINES = 8
BLOCK = re.compile(r"```console\n\$ accelerate launch --cpu --num_processes 2 ([^\n]*)\n(.*?)```", re.DOTALL)


def shown_runs() -> list[list[Run]]:
    """The runs of the gallery, by group: one for each program, and those on meshes of two."""
    groups = [*GROUPS.values(), MESHES_OF_TWO, DEEPSPEED[:1]]
    return [[run for run in group if "{here}" not in run.words and "--resume" not in run.words] for group in groups]


def block(run: Run, printed: str) -> str:
    """A run as it looks in a terminal, long ones without their middle."""
    lines = printed.strip().splitlines()
    if len(lines) > LINES:
        lines = [*lines[:2], "...", *lines[3 - LINES :]]
    return "\n".join(["```console", f"$ accelerate launch --cpu --num_processes 2 {run.words}", *lines, "```"])


def main() -> None:
    """Run every example on two processes, and write what the main process prints."""
    blocks = []
    for runs in shown_runs():
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder))
            blocks += [block(run, printed) for run, printed in zip(runs, launch(runs, 2, Path(folder)), strict=True)]
    page = PAGE.read_text()
    begin = page.index(HEADING)
    end = page.index("\nThe programs need", begin)
    note = "On two processes of a CPU, as `accelerate launch` shows it:"
    PAGE.write_text(page[:begin] + "\n\n".join([HEADING, note, *blocks]) + "\n" + page[end:])


if __name__ == "__main__":
    main()
