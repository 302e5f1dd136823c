"""Real launches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import PROGRAM, python, run
from tests.support.machines import under_an_unknown_name

SCRIPT = str(Path(__file__).parent / "launched.py")


def launch(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    return run(PROGRAM, "launch", "--cpu", *words, HF_HOME=str(home), OMP_NUM_THREADS="1")


def said(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


@pytest.mark.takes_turns
@pytest.mark.launch
def test_one_and_two_processes(tmp_path: Path) -> None:
    one = said(launch("--mixed_precision", "bf16", SCRIPT, "--x", home=tmp_path))
    assert one == {"places": [[0, "cpu", None]], "precision": "bf16", "argv": ["--x"]}
    two = said(launch("--num_processes", "2", SCRIPT, home=tmp_path))
    assert two["places"] == [[0, "cpu", "0"], [1, "cpu", "1"]]


@pytest.mark.takes_turns
@pytest.mark.launch
def test_failures_are_passed_on(tmp_path: Path) -> None:
    done = launch("--num_processes", "2", SCRIPT, "fail", home=tmp_path)
    assert done.returncode not in (0, None)
    assert "process 1" in done.stderr
    assert launch("--no_python", "false", home=tmp_path).returncode == 1


@pytest.mark.launch
@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "-m", "accelerate.commands.launch"],
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"],
        [f"{PROGRAM}-launch"],
    ],
)
def test_old_ways_to_type_it(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('here')")
    done = run(*words, "--cpu", str(tmp_path / "a.py"), HF_HOME=str(tmp_path))
    assert done.stdout.strip() == "here", done.stderr


@pytest.mark.thorough
@pytest.mark.launch
def test_processes_are_started_again_after_a_failure(tmp_path: Path) -> None:
    """Also where the machine does not find itself by its host name, which torch's agent takes by default."""
    (tmp_path / "again.py").write_text(
        "import os, sys\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt ' + attempt + ' of ' + os.environ['RANK'] + '\\n', end='')\n"
        "sys.exit(4 if attempt + os.environ['RANK'] == '01' else 0)\n"
    )
    words = ["launch", "--cpu", "--num_processes", "2", "--max_restarts", "1", str(tmp_path / "again.py")]
    done = run(*under_an_unknown_name(), PROGRAM, *words, HF_HOME=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert {"attempt 1 of 0", "attempt 1 of 1"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--help"], {"torch", "yaml"}),
        (["env", "--help"], {"torch", "yaml"}),
        (["launch", "--help"], {"torch", "yaml"}),
        (["estimate-memory", "--help"], {"torch", "timm"}),
        (["merge-weights", "--help"], {"torch", "timm"}),
        (["completion", "bash"], {"torch", "yaml"}),
        (["launch", "--cpu", "--num_processes", "1", "a.py"], {"torch", "yaml", "socket"}),
        (["launch", "--num_processes", "1", "a.py"], {"torch", "yaml", "socket"}),
        (["launch", "--config_file", "a.yaml", "a.py"], {"torch", "yaml", "socket"}),  # JSON in a file called YAML
    ],
)
def test_what_is_not_imported(words: list[str], unwanted: set[str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / "a.yaml").write_text('{"distributed_type": "NO"}')
    program = f"""
import os, sys
there = set(sys.modules)
os.chdir({str(tmp_path)!r})
os.execvpe = lambda *words: sys.exit(0)
from accel_cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
found = {unwanted | {"numpy", "psutil", "transformers", "huggingface_hub"}!r} & set(sys.modules) - there
assert not found, found
"""
    done = python("-c", program, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
