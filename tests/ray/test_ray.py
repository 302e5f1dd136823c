"""Training in the workers of Ray Train: as a launcher, and around an `Accelerator`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import pytest

from tests.clusters.slurm import wait_for
from tests.ray.training import SAMPLES

pytestmark = [
    pytest.mark.launch,
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]"),
]

HERE = Path(__file__).parent
PROGRAM = str(Path(sys.executable).parent / "accelerate")
ENVIRON = {
    **os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]),
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[IO[str]]:
    """The input of a cluster's process; its address is in the environment."""
    words = [sys.executable, str(HERE / "cluster.py")]
    with subprocess.Popen(words, env=ENVIRON, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        ENVIRON["RAY_ADDRESS"] = next(line.strip() for line in lines if line.startswith("127.") or line[0].isdigit())
        yield process.stdin
        process.stdin.close()
    del ENVIRON["RAY_ADDRESS"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weight of a run that nothing disturbs, on two processes of this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = [PROGRAM, "launch", "--cpu", "--num_processes", "2", str(HERE / "training.py"), str(folder), "{}"]
    subprocess.run(words, env=ENVIRON, check=True, capture_output=True)
    return (folder / "weight").read_text()


def check(folder: Path, undisturbed: str) -> None:
    """Each sample was taken once, and the weight is that of the run that nothing disturbed, bit for bit."""
    taken = [sample for file in folder.glob("*.step") for sample in json.loads(file.read_text())]
    assert sorted(taken) == list(range(SAMPLES))
    assert (folder / "weight").read_text() == undisturbed


def launch(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PROGRAM, "launch", "--cpu", "--launcher", "ray", *words],
        env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_a_launch_restarts_saves_when_it_is_signalled_and_is_resumed_here(
    cluster: IO[str], undisturbed: str, tmp_path: Path
) -> None:
    options = {"kills": [(2, 1, "before")], "waits_at": 4, "save_on_signals": "SIGTERM"}
    words = ["--num_processes", "2", "--ray_resources", "CPU=1", "--max_restarts", "1", "--mixed_precision", "no"]
    with launch(*words, str(HERE / "training.py"), str(tmp_path), json.dumps(options)) as started:
        wait_for((tmp_path / "4.step").exists, seconds=300)
        os.kill(started.pid, signal.SIGTERM)
        (tmp_path / "end").touch()
        out, errors = started.communicate()
    assert started.returncode == 75, errors
    assert out == ""
    assert "accelerate launch: rank 1 was killed by SIGKILL: " in errors
    assert (
        "process 1 was killed by SIGKILL: the machine ran out of memory, or a user killed it; all are restarted (restart 1 of 1)."
        in errors
    )
    assert "rank 0 failed" not in errors, "which has lost rank 1"
    assert "exits with code 75" in errors
    assert "Ray" not in errors
    words = [PROGRAM, "launch", "--cpu", "--num_processes", "2", str(HERE / "training.py"), str(tmp_path), "{}"]
    done = subprocess.run(words, env=ENVIRON, check=True, capture_output=True, text=True)
    assert int(done.stdout.removeprefix("began at step ")) >= 5
    check(tmp_path, undisturbed)


HOLDS_ON = """
import signal, time
for name in ("SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, _: print("caught", signal.Signals(number).name, flush=True))
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_processes_and_a_second_one_ends_at_once(
    cluster: IO[str], tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "holds_on.py"
    script.write_text(HOLDS_ON)
    with launch("--num_processes", "2", str(script)) as started:
        assert started.stdout is not None
        for line in ("ready\n", f"caught {number.name}\n"):
            assert [started.stdout.readline() for _ in range(2)] == [line] * 2
            os.kill(started.pid, number)
        started.communicate()
    assert started.returncode == 128 + number


def test_an_interrupted_launch_saves(cluster: IO[str], tmp_path: Path) -> None:
    options = {"waits_at": 1, "save_on_signals": "SIGINT"}
    with launch("--num_processes", "2", str(HERE / "training.py"), str(tmp_path), json.dumps(options)) as started:
        wait_for((tmp_path / "1.step").exists, seconds=300)
        environ = {name: text for name, text in ENVIRON.items() if not name.startswith("RAY_TRAIN")}
        words = [PROGRAM, "launch", "--cpu", "--launcher", "ray", "--num_processes", "3", str(HERE / "training.py")]
        second = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        os.kill(started.pid, signal.SIGINT)
        (tmp_path / "end").touch()
        _, errors = started.communicate()
    assert started.returncode == 75, errors
    assert "after SIGINT, and exits with code 75" in errors
    assert "3 workers need 3 CPU, and the cluster has 4, of which 2 are free. Give a lower" in second.stderr


def test_a_launch_fails_as_on_this_machine(cluster: IO[str], tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\nprint(sys.argv[1:], flush=True)\nif os.environ['RANK'] == '1': raise ValueError('only here')\n"
        "import time; time.sleep(100)\n"
    )
    with launch("--num_processes", "2", str(script), "a b") as started:
        out, errors = started.communicate()
    assert started.returncode == 1
    assert out == "['a b']\n" * 2
    assert errors.count("ValueError: only here") == 1
    assert "process 1 ended with exit status 1; the others were terminated." in errors.splitlines()[-1]


def test_a_trainer_goes_on_without_the_node_that_was_killed(
    cluster: IO[str], undisturbed: str, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, str(HERE / "trainer.py"), str(tmp_path)], env=ENVIRON) as trainer:
        wait_for((tmp_path / "3.step").exists, seconds=300)
        cluster.write("\n")
        cluster.flush()
        wait_for(lambda: json.loads((tmp_path / "3.step").read_text()))
        (tmp_path / "end").touch()
    assert trainer.returncode == 0
    check(tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("environ", "words", "reason"),
    [
        (
            {"RAY_ADDRESS": "127.0.0.1:9"},
            ["--num_processes", "2"],
            "No head of Ray can be reached at RAY_ADDRESS=127.0.0.1:9",
        ),
        (
            {},
            ["--num_processes", "2", "--ray_resources", "GPU=1"],
            "2 workers need 2 GPU, and the cluster has 0. Give",
        ),
    ],
)
def test_what_cannot_start_is_said_in_one_sentence(
    environ: dict[str, str], words: list[str], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    variables = {
        name: text
        for name, text in ENVIRON.items()
        if name not in ("RAY_ADDRESS", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S")
    }
    command = [PROGRAM, "launch", "--cpu", "--launcher", "ray", *words, str(tmp_path / "train.py")]
    done = subprocess.run(command, env={**variables, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
