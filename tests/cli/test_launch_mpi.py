"""CPU processes that mpirun starts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from accel_cli.launch.machine import Machine
from accel_cli.launch.runners.mpi import kind_of
from tests.cli.pretended import Pretended, plan_of, settings_of
from tests.cli.running import PROGRAM, run
from tests.support.machines import needs_namespaces, two_machines

OPEN_MPI = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/"
OTHERS = {
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102",
    "MVAPICH": "HYDRA build details:\n    Version: 3.0\n    Configure options: 'MVAPICH=3.0'",
    "MPICH": "HYDRA build details:\n    Version:                                 4.0.2",
}
SCRIPT = str(Path(__file__).parent / "launched.py")
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun: apt install openmpi-bin")


@pytest.fixture(autouse=True)
def hostfiles(tmp_path: Path, in_a_folder_with_a_script: None) -> None:
    (tmp_path / "hosts").write_text("one slots=2  # the first\n\n# a comment\ntwo:2\n")
    (tmp_path / "here").write_text("localhost slots=2\n")


def test_open_mpi() -> None:
    words = ["--cpu", "--num_processes", "4", "--mpirun_hostfile", "hosts", "train.py", "--lr", "1"]
    environ = {"HF_TOKEN": "secret", "EDITOR": "vi"}
    plan = plan_of(*words, machine=Pretended(mpi=OPEN_MPI), environ=environ)
    start, sent = list(plan.argv[:9]), list(plan.argv[9:-4])
    assert start == ["mpirun", "--hostfile", "hosts", "-N", "2", "-n", "4", "--bind-to", "socket"]
    assert sent[::2] == ["-x"] * (len(sent) // 2)
    assert {"MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS", "HF_TOKEN"} <= set(sent[1::2])
    assert "EDITOR" not in sent
    assert "secret" not in " ".join(plan.argv)
    assert list(plan.argv[-4:]) == [sys.executable, "train.py", "--lr", "1"]
    assert (plan.environment["MASTER_ADDR"], plan.environment["MASTER_PORT"]) == ("one", "29500")


@pytest.mark.parametrize("kind", list(OTHERS))
def test_the_others_speak_alike(kind: str) -> None:
    words = ["--cpu", "--num_processes", "4", "--num_machines", "2", "--mpirun_hostfile", "hosts",
             "--main_process_ip", "10.0.0.1", "--main_process_port", "99", "train.py"]  # fmt: skip
    plan = plan_of(*words, machine=Pretended(mpi=OTHERS[kind], root=True))
    assert kind_of(OTHERS[kind]).name == kind
    assert plan.argv == (
        *("mpirun", "-f", "hosts", "-ppn", "2", "-n", "4", "-genvall"),
        *(sys.executable, "train.py"),
    )
    assert (plan.environment["MASTER_ADDR"], plan.environment["MASTER_PORT"]) == ("10.0.0.1", "99")


def test_root_must_say_so_to_open_mpi() -> None:
    words = ["--cpu", "--num_processes", "2", "--mpirun_hostfile", "here", "train.py"]
    assert "--allow-run-as-root" in plan_of(*words, machine=Pretended(mpi=OPEN_MPI, root=True)).argv
    alone = plan_of(*words, machine=Pretended(mpi=OPEN_MPI)).argv
    assert "--allow-run-as-root" not in alone
    assert "-x" not in alone  # this machine's processes have the environment already


def test_a_settings_file() -> None:
    section = {"mpirun_hostfile": "here", "mpirun_ccl": "3"}
    Path("a.json").write_text(
        json.dumps({"distributed_type": "MULTI_CPU", "num_processes": 2, "mpirun_config": section})
    )
    plan = plan_of("--config_file", "a.json", "train.py", machine=Pretended(mpi=OPEN_MPI, cores=4))
    assert plan.runner == "mpi"
    assert plan.environment["CCL_WORKER_COUNT"] == "3"
    assert plan.environment["OMP_NUM_THREADS"] == "2"


def test_under_mpirun_the_hostfile_has_been_used_already() -> None:
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    words = ["--cpu", "--num_processes", "2", "--mpirun_hostfile", "nowhere", "train.py"]
    assert plan_of(*words, environ=environ).runner == "simple"


@pytest.mark.parametrize(
    ("words", "mpi", "message"),
    [
        (["--mpirun_hostfile", "here"], "", "needs the program 'mpirun'"),
        (["--mpirun_hostfile", "here"], "strange 1.0\nmore", "printed 'strange 1.0', which is not a supported MPI. Use one of Open MPI"),
        (["--mpirun_hostfile", "nothing"], OPEN_MPI, "'nothing' lists no machine"),
        (["--mpirun_hostfile", "missing"], OPEN_MPI, "'missing' does not exist"),
        (["--mpirun_hostfile", "."], OPEN_MPI, "'.' cannot be read"),
        (["--mpirun_hostfile", "here", "--num_machines", "2"], OPEN_MPI,
         "--num_machines 2 is more than the machines in --mpirun_hostfile 'here': localhost"),
        (["--mpirun_hostfile", "here", "--num_processes", "4"], OPEN_MPI,
         "4 processes on 1 machines are 4 on each, and --mpirun_hostfile 'here' has 2 slots for 'localhost'"),
    ],
)  # fmt: skip
def test_mistakes(words: list[str], mpi: str, message: str) -> None:
    Path("nothing").write_text("# nobody\n")
    with pytest.raises(ValueError, match=message):
        plan_of("--cpu", "--num_processes", "2", *words, "train.py", machine=Pretended(mpi=mpi))


def test_machines_are_counted_in_the_hostfile() -> None:
    settings = settings_of("--cpu", "--mpirun_hostfile", "hosts", "x.py", machine=Pretended(mpi=OPEN_MPI))
    assert (settings.hosts, settings.num_machines, settings.num_processes) == ({"one": 2, "two": 2}, 2, 2)
    assert settings.sources["num_machines"] == "guess"


def test_hostfiles(tmp_path: Path) -> None:
    (tmp_path / "several").write_text("a\nb:3\nfe80::1\nc max_slots=9 slots = 4 # 5\na slots=2\n")
    assert Machine().hosts("several") == {"a": 2, "b": 3, "fe80::1": None, "c": 4}


def test_what_this_mpirun_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho strange $1\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Machine().mpi_version() == "strange --version"
    (tmp_path / "mpirun").unlink()
    assert Machine().mpi_version() == ""


def places(*words: str) -> list[object]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = run(*words, HF_HOME="/nowhere", OMP_NUM_THREADS="1", **root)
    assert done.returncode == 0, done.stderr
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return [said["places"], said["precision"]]


@needs_mpirun
@pytest.mark.launch
@pytest.mark.thorough
def test_open_mpi_for_real() -> None:
    words = ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "--main_process_port", "0"]
    start = places(PROGRAM, "launch", *words, "--mpirun_hostfile", "here", SCRIPT)
    assert start == [[[0, "cpu", "0"], [1, "cpu", "1"]], "bf16"]
    inside = places("mpirun", "-n", "2", "--hostfile", "here", PROGRAM, "launch", *words[:-1], "29613", SCRIPT)
    assert inside == start


@needs_mpirun
@pytest.mark.launch
def test_the_status_of_mpirun_is_passed_on() -> None:
    words = ["--cpu", "--num_processes", "2", "--mpirun_hostfile", "here", "--no_python", "sh", "-c", "exit 5"]
    done = run(PROGRAM, "launch", *words, HF_HOME="/nowhere")
    assert done.returncode == 5, done.stderr


WHERE = """
import json, socket
from accelerate import PartialState
from accelerate.utils import gather_object
state = PartialState(cpu=True)
found = gather_object([[state.process_index, state.local_process_index, socket.gethostname()]])
if state.is_main_process:
    print(json.dumps(found), flush=True)
state.destroy_process_group()
"""


@needs_mpirun
@needs_namespaces
@pytest.mark.launch
@pytest.mark.thorough
def test_two_machines_for_real(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("10.79.0.1 slots=1\n10.79.0.2 slots=1\n")
    (tmp_path / "where.py").write_text(WHERE)
    environ = {"GLOO_SOCKET_IFNAME": "eth9", "OMPI_MCA_plm_rsh_agent": str(tmp_path / "reach")}
    with two_machines("mpi") as (first, second):
        (tmp_path / "reach").write_text(  # in the place of ssh
            f'#!/bin/sh\nshift\nexec ip netns exec {second} unshare --uts sh -c "hostname second; $*"\n'
        )
        (tmp_path / "reach").chmod(0o755)
        command = f"hostname first; {PROGRAM} launch --cpu --num_processes 2 --mpirun_hostfile hosts where.py"
        start = ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c", command]
        done = run(*start, HF_HOME=str(tmp_path), OMP_NUM_THREADS="1", **environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert found == [[0, 0, "first"], [1, 0, "second"]]
