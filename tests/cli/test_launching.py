"""Real launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(sys.executable).parent / "accelerate")
SCRIPT = str(Path(__file__).parent / "launched.py")


def run(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=200)


def said(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


@pytest.mark.launch
def test_one_and_two_processes(tmp_path: Path) -> None:
    one = said(run(PROGRAM, "launch", "--cpu", "--mixed_precision", "bf16", SCRIPT, "--x", home=tmp_path))
    assert one == {"places": [[0, "cpu", None]], "precision": "bf16", "argv": ["--x"]}
    two = said(run(PROGRAM, "launch", "--cpu", "--num_processes", "2", SCRIPT, home=tmp_path))
    assert two["places"] == [[0, "cpu", "0"], [1, "cpu", "1"]]


@pytest.mark.launch
def test_failures_are_passed_on(tmp_path: Path) -> None:
    done = run(PROGRAM, "launch", "--cpu", "--num_processes", "2", SCRIPT, "fail", home=tmp_path)
    assert done.returncode not in (0, None)
    assert "process 1" in done.stderr
    code = run(PROGRAM, "launch", "--cpu", "--no_python", "false", home=tmp_path).returncode
    assert code == 1


@pytest.mark.launch
def test_old_ways_to_type_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('here')")
    for words in (["-m", "accelerate.commands.launch"], ["-m", "accelerate.commands.accelerate_cli", "launch"]):
        done = run(sys.executable, *words, "--cpu", str(tmp_path / "a.py"), home=tmp_path)
        assert done.stdout.strip() == "here", done.stderr
    done = run(str(Path(PROGRAM).parent / "accelerate-launch"), "--cpu", str(tmp_path / "a.py"), home=tmp_path)
    assert done.stdout.strip() == "here"


def test_settings_are_written_once(tmp_path: Path) -> None:
    from accel_cli.configfile.read import load_config_from_file

    assert run(PROGRAM, "config", "default", "--mixed_precision", "bf16", home=tmp_path).returncode == 0
    (written,) = (tmp_path / "accelerate").iterdir()
    assert load_config_from_file(str(written)).mixed_precision == "bf16"
    again = run(PROGRAM, "config", "default", home=tmp_path)
    assert "exists already" in again.stdout + again.stderr
    assert load_config_from_file(str(written)).mixed_precision == "bf16"


def test_environment_report(tmp_path: Path) -> None:
    done = run(PROGRAM, "env", home=tmp_path)
    assert done.returncode == 0
    assert "PyTorch version" in done.stdout


@pytest.mark.parametrize("words", ["'--help'", "'env', '--help'", "'launch', '--help'"])
def test_help_loads_no_torch(words: str, tmp_path: Path) -> None:
    program = f"""
import sys
from accel_cli.main import main
try:
    main([{words}])
except SystemExit:
    pass
heavy = {{"torch", "yaml", "numpy", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = run(sys.executable, "-c", program, home=tmp_path)
    assert done.returncode == 0, done.stderr


def notebook_cell(path: str) -> None:
    from accel_state.processes import PartialState

    state = PartialState()
    Path(path, str(state.process_index)).write_text(str(state.num_processes))


@pytest.mark.launch
def test_functions_are_started_too(tmp_path: Path) -> None:
    program = f"""
from accelerate import debug_launcher, notebook_launcher
from tests.cli.test_launching import notebook_cell
debug_launcher(notebook_cell, args=({str(tmp_path)!r},), num_processes=2)
"""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2", "1": "2"}
