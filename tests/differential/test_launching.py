"""Config files are the same in both directions, and scripts find the same environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.differential.running import REFERENCE, compare, needs_reference, recorded

pytestmark = needs_reference
INTENDED = {
    "* many *": "--cpu --num_processes 2 starts two processes; 1.15 starts one without saying so",
    "KMP_* flags ": "ACCELERATE_USE_CPU of the environment counts as --cpu does",
    "KMP_* flags --mixed_precision no": "the same",
    "ACCELERATE_USE_CPU flags *": "the same",
    "CUDA_VISIBLE_DEVICES flags --cpu --gpu_ids 0": "--cpu uses no GPU, whatever the list",
}


def test_files_and_flags_reach_the_script(tmp_path: Path) -> None:
    folders = {python: tmp_path / name for python, name in ((sys.executable, "ours"), (REFERENCE, "theirs"))}
    for folder in folders.values():
        folder.mkdir()
    written = {python: recorded(python, "launching", "write", str(folder)) for python, folder in folders.items()}
    compare(written[sys.executable], written[REFERENCE], least=15)
    for folder in folders.values():
        seen = {python: recorded(python, "launching", "read", str(folder)) for python in folders}
        compare(seen[sys.executable], seen[REFERENCE], intended=INTENDED, least=600)


def test_env_tells_what_reports_of_problems_ask_for() -> None:
    facts = ("version", "platform", "location", "python version", "numpy version", "pytorch version", "system ram")
    for python in (sys.executable, REFERENCE):
        command = [python, "-c", "from accelerate.commands.accelerate_cli import main; main()", "env"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for fact in (*facts, "pytorch accelerator", "default config"):
            assert fact in done.stdout.lower(), (python, done.stdout)
