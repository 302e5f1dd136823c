"""Real launches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.machines import under_an_unknown_name

PROGRAM = str(Path(sys.executable).parent / "accelerate")
SCRIPT = str(Path(__file__).parent / "launched.py")


def run(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=300)


def said(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


@pytest.mark.takes_turns
@pytest.mark.launch
def test_one_and_two_processes(tmp_path: Path) -> None:
    one = said(run(PROGRAM, "launch", "--cpu", "--mixed_precision", "bf16", SCRIPT, "--x", home=tmp_path))
    assert one == {"places": [[0, "cpu", None]], "precision": "bf16", "argv": ["--x"]}
    two = said(run(PROGRAM, "launch", "--cpu", "--num_processes", "2", SCRIPT, home=tmp_path))
    assert two["places"] == [[0, "cpu", "0"], [1, "cpu", "1"]]


@pytest.mark.takes_turns
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
    done = run(*under_an_unknown_name(), PROGRAM, *words, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"attempt 1 of 0", "attempt 1 of 1"} <= set(done.stdout.splitlines())


@pytest.mark.takes_turns
@pytest.mark.launch
def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(
        "import os, pathlib, time\n"
        "folder = pathlib.Path(__file__).parent\n"
        "(folder / ('pid' + os.environ['RANK'])).write_text(str(os.getpid()))\n"
        "time.sleep(100)\n"
    )
    words = [PROGRAM, "launch", "--cpu", "--num_processes", "2", str(script)]
    with subprocess.Popen(
        words, env={**os.environ, "HF_HOME": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    ) as job:
        pids = [read_soon(tmp_path / f"pid{rank}") for rank in range(2)]
        job.send_signal(signal.SIGINT)
        _, said = job.communicate(timeout=300)
    assert job.returncode == 128 + signal.SIGINT
    assert "accel_cli" not in said  # the only tracebacks are the script's
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def read_soon(path: Path) -> str:
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, "the process did not start"
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--help"], {"torch", "yaml"}),
        (["env", "--help"], {"torch", "yaml"}),
        (["launch", "--help"], {"torch", "yaml"}),
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
    done = run(sys.executable, "-c", program, home=tmp_path)
    assert done.returncode == 0, done.stderr
