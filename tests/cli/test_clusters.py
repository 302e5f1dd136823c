"""Launches inside the jobs of schedulers: which nodes they join, and what they refuse."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from accel_cli.errors import UsageError
from accel_cli.launch import network
from accel_cli.launch.runners import meeting
from accel_cli.launch.runners.meeting import Meeting
from accel_cli.launch.show import show
from tests.cli.pretended import Pretended, settings_of, settled
from tests.cli.running import PROGRAM, run
from tests.support.hidden_devices import NO_DEVICES
from tests.support.machines import ADDRESSES, needs_namespaces, two_machines
from tests.support.ports import free_ports

pytestmark = pytest.mark.usefixtures("in_a_folder_with_a_script")
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "trainer-0", "PET_MASTER_PORT": "1234"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
}  # fmt: skip
DSTACK = {
    "DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_GPUS_PER_NODE": "4",
}  # fmt: skip


def step(nodes: int, tasks_per_node: int = 1, node: int = 1, local: int = 0) -> dict[str, str]:
    """The variables of a step that `srun` started."""
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node * tasks_per_node + local), "SLURM_LOCALID": str(local),
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks_per_node), "SLURM_STEP_NODELIST": "gpu[07-09]",
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks_per_node}(x{nodes})",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "cluster", "address", "port", "count"),
    [
        (KUBEFLOW, "Kubeflow", "trainer-0", 1234, 2),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "3"}, "Kubeflow", "trainer-0", 1234, 6),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, "Kubeflow", "trainer-0", 1234, 2),
        (SKYPILOT, "SkyPilot", "10.0.0.1", 29500, 8),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, "SkyPilot", "10.0.0.1", 29500, 2),
        (DSTACK, "dstack", "10.0.0.1", 29500, 8),
        (step(2), "SLURM", "gpu07", 15007, 2),
    ],
)
def test_the_nodes_of_a_job_are_defaults(
    environ: dict[str, str], cluster: str, address: str, port: int, count: int
) -> None:
    settings, plan = settled("--cpu", "train.py", environ=environ)
    assert (settings.num_machines, settings.machine_rank, settings.num_processes) == (2, 1, count)
    assert (settings.main_process_ip, settings.main_process_port) == (address, port)
    assert plan.runner == "torchrun"
    assert "--nnodes=2" in plan.argv
    assert "--node_rank=1" in plan.argv
    line = next(line for line in show(settings, plan).splitlines() if line.startswith("num_machines"))
    assert line.split() == ["num_machines", "2", cluster]
    given, _ = settled("--cpu", "--num_processes", "4", "--main_process_ip", "head", "train.py", environ=environ)
    assert (given.num_processes, given.main_process_ip, given.num_machines) == (4, "head", 2)


def test_each_node_starts_as_many_as_it_has_accelerators() -> None:
    settings = settings_of("train.py", environ=step(2), machine=Pretended(devices=8))
    assert settings.num_processes == 16
    assert settings.notes[0].startswith("starting 8 of 16 processes, one for each accelerator found.")


def test_one_node_is_no_cluster() -> None:
    for environ in (step(1, node=0), KUBEFLOW | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}):
        settings = settings_of("--cpu", "train.py", environ=environ)
        assert (settings.num_machines, settings.num_processes, settings.runner) == (1, 1, "simple")
    four = settings_of("--cpu", "train.py", environ={"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"})
    assert (four.num_processes, four.sources["num_processes"]) == (4, "cluster")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--num_machines", "1"], "--num_machines is 1"),
        (["--num_machines", "2", "--machine_rank", "0"], "--machine_rank is 0"),
        (["--num_processes", "3"], "num_processes is 3"),
    ],
)
@pytest.mark.parametrize(
    "environ", [KUBEFLOW, SKYPILOT, DSTACK, step(2)], ids=["Kubeflow", "SkyPilot", "dstack", "SLURM"]
)
def test_what_would_train_apart_is_refused(environ: dict[str, str], words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=f"runs this command on 2 nodes.*{reason}"):
        settings_of("--cpu", *words, "train.py", environ=environ)


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_machines: 1\nmachine_rank: 0\nnum_processes: 2\nuse_cpu: true\n")
    with pytest.raises(
        UsageError, match=rf"{file} has num_machines: 1 and {file} has machine_rank: 0.*--num_machines 2"
    ):
        settings_of("--config_file", str(file), "train.py", environ=step(2))
    words = ["--config_file", str(file), "--num_machines", "2", "--machine_rank", "1", "train.py"]
    assert settings_of(*words, environ=step(2)).num_processes == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"PET_NNODES": "1:3"}, "leaves the number of nodes open"),
        ({"PET_NODE_RANK": ""}, "PET_NODE_RANK is not"),
        ({"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 is not the rank of one of 2 nodes"),
        ({"PET_NNODES": "two"}, "PET_NNODES is 'two'"),
        (
            SKYPILOT | {"PET_NNODES": "", "SKYPILOT_NODE_IPS": "10.0.0.1"},
            "SKYPILOT_NODE_IPS has 1 addresses for 2 nodes",
        ),
        (DSTACK | {"PET_NNODES": "", "DSTACK_NODES_IPS": "10.0.0.1"}, "DSTACK_NODES_IPS has 1 addresses for 2 nodes"),
    ],
)
def test_variables_that_contradict_one_another(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        settings_of("--cpu", "train.py", environ=KUBEFLOW | changes)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_pods_without_the_accelerators_that_they_count(nodes: str) -> None:
    for count in ("auto", "gpu"):
        environ = KUBEFLOW | {"PET_NNODES": nodes, "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": count}
        with pytest.raises(UsageError, match=f"PET_NPROC_PER_NODE={count} is one process for each .* Give --cpu"):
            settled("train.py", environ=environ)
        assert settings_of("train.py", environ=environ, machine=Pretended(devices=8)).num_processes == 8 * int(nodes)
        for words in (["--cpu"], ["--num_processes", nodes]):
            assert settled(*words, "train.py", environ=environ)[0].num_processes == int(nodes)


def test_a_rendezvous_that_needs_no_ranks_may_have_any() -> None:
    words = ["--num_machines", "2", "--machine_rank", "0", "--rdzv_backend", "c10d", "--main_process_ip", "head"]
    settings = settings_of("--cpu", *words, "train.py", environ=step(2))
    assert (settings.machine_rank, settings.main_process_ip) == (1, "head")


def test_a_launch_for_each_process_runs_the_script() -> None:
    environ = step(2, tasks_per_node=2, local=1)
    settings, plan = settled("--cpu", "train.py", environ=environ)
    assert (settings.runner, settings.num_processes, settings.started_by) == ("simple", 4, "SLURM")
    assert (plan.environment["MASTER_ADDR"], plan.environment["MASTER_PORT"]) == ("gpu07", "15007")
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert settings_of("train.py", environ=mpi, machine=Pretended(devices=8)).runner == "simple"
    for variables in (environ, mpi):
        for words in (["--cpu"], []):
            with pytest.raises(UsageError, match="started this command 4 times, and num_processes is 8.*4 separate"):
                settings_of(
                    *words, "--num_processes", "8", "train.py", environ=variables, machine=Pretended(devices=8)
                )
    words = ["--num_machines", "4", "--machine_rank", "1", "--num_processes", "32", "--main_process_ip", "head"]
    agents = settings_of(*words, "train.py", environ=mpi, machine=Pretended(devices=8))
    assert (agents.runner, agents.num_machines) == ("torchrun", 4), "mpirun started one on each of four machines"


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head"}, "PET_NODE_RANK='1' is set, and PET_NNODES is not"),
        ({"DSTACK_MASTER_NODE_IP": "head"}, "DSTACK_MASTER_NODE_IP='head' is set, and DSTACK_NODES_NUM is not"),
        ({"RANK": "1", "MASTER_ADDR": "head"}, "RANK='1' is set, and WORLD_SIZE is not"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS='4' is set, and SLURM_PROCID is not"),
    ],
)
def test_a_half_given_set_of_variables_is_refused_unless_flags_say_the_rest(
    environ: dict[str, str], reason: str
) -> None:
    for words in ([], ["--num_processes", "2"], ["--num_machines", "2", "--main_process_ip", "head"]):
        with pytest.raises(UsageError, match=reason):
            settings_of("--cpu", *words, "train.py", environ=environ)
    assert settings_of("--cpu", "--num_machines", "1", "train.py", environ=environ).runner == "local", "has own ranks"
    words = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "head", "--main_process_port", "1"]
    assert settled("--cpu", *words, "train.py", environ=environ)[1].runner == "torchrun"


def test_a_missing_address_of_node_0_is_named() -> None:
    nodes = {name: value for name, value in KUBEFLOW.items() if name != "PET_MASTER_ADDR"}
    with pytest.raises(UsageError, match="the address of machine 0 .* Give --main_process_ip, or set PET_MASTER_ADDR"):
        settled("--cpu", "train.py", environ=nodes)
    assert settled("--cpu", "train.py", environ=nodes | {"MASTER_ADDR": "head"})[0].main_process_ip == "head"


def test_ranks_of_pods() -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    with pytest.raises(UsageError, match="RANK is 1 and WORLD_SIZE 2, but no flag says how many machines"):
        settings_of("--cpu", "train.py", environ=pod)
    apart, plan = settled("--cpu", "--num_machines", "1", "train.py", environ=pod)
    assert (apart.runner, plan.num_workers, plan.environment["MASTER_ADDR"]) == ("local", 1, "127.0.0.1"), (
        "not the pods'"
    )
    words = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "head", "--main_process_port", "1"]
    assert settings_of("--cpu", *words, "train.py", environ=pod).num_machines == 2
    inside_a_worker = pod | {"LOCAL_RANK": "1", "GROUP_RANK": "0"}
    assert settings_of("--cpu", "train.py", environ=inside_a_worker).num_machines == 1


def test_a_batch_script_without_srun_is_told() -> None:
    script = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    (note,) = settings_of("--cpu", "train.py", environ=script).notes
    assert "this SLURM job has 2 nodes, and the run uses this one alone" in note
    assert not settings_of("--cpu", "train.py", environ=script | {"SLURM_JOB_NUM_NODES": "1"}).notes


def test_a_name_without_an_address_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *words: Any, **more: Any) -> list[Any]:
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(-2, "Name or service not known")
        return real("127.0.0.1", *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(network, "REACH_SECONDS", -1.0)
    notes: list[str] = []
    network.wait_until_reached("trainer-0", 9, listens_here=False, seconds=30, note=notes.append)
    assert set(asked) == {"trainer-0"}
    assert len(notes) == 1, "it is said once"
    assert notes[0].endswith("resolve on all machines. Waiting for it, up to 30 s.")
    asked.clear()
    with pytest.raises(UsageError, match="'trainer-0', has no address on this machine .Name or service not known."):
        network.wait_until_reached("trainer-0", 9, listens_here=False, seconds=-1)


def test_machine_0_may_start_later_and_has_an_address_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        network.wait_until_reached("127.0.0.1", port, listens_here=False, seconds=-1)
    network.wait_until_reached("127.0.0.1", port, listens_here=False, seconds=-1)  # refused: it has not begun
    network.wait_until_reached("127.0.0.1", port, listens_here=True, seconds=-1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of machine 0, which is looked at often."""
    monkeypatch.setattr(meeting, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(meeting, "PART_SECONDS", 0.0)
    return TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)


TWO = {"num_machines": "3", "num_processes": "3"}


def part(
    store: TCPStore, machine: int | None, has_met: Callable[[], bool] = lambda: False, told: dict[str, str] = TWO
) -> tuple[Meeting, Queue[str]]:
    """A machine's part in the meeting of three, and why it ends."""
    said: Queue[str] = Queue()
    started = Meeting(
        store.host, store.port, machine, 3, told=told, has_store=machine == 0, has_met=has_met, end=said.put
    )
    started.start()
    return started, said


@pytest.mark.parametrize("machines", [(0, 1), (1, 0), (None, None)], ids=["0 first", "1 first", "any"])
def test_machines_compare_what_they_were_told(store: TCPStore, machines: tuple[int | None, int | None]) -> None:
    first, first_said = part(store, machines[0])
    store.wait([f"{meeting.PREFIX}/{meeting.TOLD}"])
    second, said = part(
        store, machines[1], told=TWO | {"num_processes": "6", "FSDP_VERSION": "2"}, has_met=lambda: True
    )
    reason = said.get(timeout=60)
    assert "was told num_processes 6, FSDP_VERSION 2;" in reason, "though the processes have met by then"
    assert reason.endswith(": num_processes 3, FSDP_VERSION unset. Give all machines the same settings.")
    assert first_said.get(timeout=60) == reason
    for launch in (first, second):
        launch.leave(1)
    later, said = part(store, machines[0])
    store.wait([f"{meeting.PREFIX}/{machines[0]}"])
    later.leave(0)
    assert said.empty(), "one that was told the same as the first is not ended for it"


def test_two_launches_of_one_machine_are_told(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = part(store, 1)
    store.wait([f"{meeting.PREFIX}/launch of 1"])
    monkeypatch.setattr(os, "getpid", lambda: -5)  # of another launch
    second, said = part(store, 1)
    assert said.get(timeout=60).startswith("Two launches have --machine_rank 1: ")
    first.leave(1)
    second.leave(1)


def test_a_launch_that_fails_ends_those_that_wait_for_it(store: TCPStore) -> None:
    fails, _ = part(store, 1)
    store.wait([f"{meeting.PREFIX}/1"])
    fails.leave(3)
    for machine in (0, 2):
        waits, said = part(store, machine)
        reason = "Machine 1 ended with exit status 3 while the run was starting, which cannot begin without it."
        assert said.get(timeout=60) == waits.fault == reason
        waits.leave(1)


def test_a_launch_that_is_killed_ends_those_that_wait_for_it(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOST_SECONDS", 0.5)
    store.set(f"{meeting.PREFIX}/1", "its last sign of life")
    waits, said = part(store, 0)
    assert "Machine 1 has given no sign of life" in said.get(timeout=60)
    assert waits.fault
    waits.leave(1)


def test_machines_whose_launch_has_not_begun_are_named(store: TCPStore) -> None:
    waits, said = part(store, 0)
    store.wait([f"{meeting.PREFIX}/0"])
    assert waits.absent() == "the launch of machine 1, 2"
    second, _ = part(store, 2)
    store.wait([f"{meeting.PREFIX}/2"])
    assert (waits.absent(), second.absent()) == ("the launch of machine 1",) * 2
    for launch in (second, waits):
        launch.leave(0)
    assert said.empty(), "which is no fault"


IMPATIENT = """
import sys
from accel_cli.main import main
from accel_state import long_wait
long_wait.PATIENCE_SECONDS = 3.0
sys.exit(main(sys.argv[1:]))
"""
FOR_MACHINE_0, FOR_OTHERS = (
    "the launch of machine 0 at 127.0.0.1:{port}",
    "the launches of the other machines, 2 in all",
)


@pytest.mark.takes_turns
@pytest.mark.launch
def test_a_launch_says_for_whom_it_waits_and_until_when() -> None:
    """Two of machine 1, static and elastic, whose machine 0 never comes, and of machine 0 whose machine 1 never does."""
    waiting = []
    words = ["launch", "--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    cases = [(0, "static", "the launch of machine 1"), (1, "static", FOR_MACHINE_0), (0, "c10d", FOR_OTHERS),
             (1, "c10d", FOR_MACHINE_0)]  # fmt: skip
    for machine, backend, whom in cases:
        (port,) = free_ports(1)
        choice = f"--machine_rank {machine} --rdzv_backend {backend} --main_process_port {port}"
        choice += " --rdzv_conf timeout=70,join_timeout=70,read_timeout=70 train.py"
        command = [sys.executable, "-c", IMPATIENT, *words, *choice.split()]
        waiting.append((subprocess.Popen(command, stderr=subprocess.PIPE, text=True), whom.format(port=port)))
    try:
        for launch, whom in waiting:
            assert launch.stderr is not None
            said = next(line for line in launch.stderr if line.startswith("accelerate launch: "))
            assert said.startswith(f"accelerate launch: waiting for {whom}, until ")
            assert said.endswith("(70 s from the start of the wait).\n")
    finally:
        for launch, _ in waiting:
            launch.kill()
            launch.communicate()


@pytest.mark.takes_turns
@pytest.mark.launch
def test_machines_with_other_numbers_of_processes_train_no_world(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORLD)
    words = f"launch --cpu --num_machines 2 --main_process_ip 127.0.0.1 --main_process_port {free_ports(1)[0]}"
    launches = [
        subprocess.Popen(
            [PROGRAM, *f"{words} --machine_rank {machine} --num_processes {count} train.py".split()],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for machine, count in enumerate([2, 4])
    ]  # fmt: skip
    for launch in launches:
        printed, said = launch.communicate(timeout=120)
        assert (launch.returncode, printed) == (1, "")
        assert "was told num_processes" in said


def test_the_launch_with_the_store_ends_last(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PART_SECONDS", 60.0)
    machines = [part(store, machine)[0] for machine in range(3)]
    for machine in range(3):
        store.wait([f"{meeting.PREFIX}/{machine}"])
    leaves = Thread(target=machines[0].leave, args=(0,))
    leaves.start()
    while store.add(f"{meeting.PREFIX}/{meeting.LEFT}", 0) < 1:
        pass
    machines[1].leave(0)
    assert leaves.is_alive(), "machine 2 needs the store still"
    machines[2].leave(0)
    leaves.join(60)
    assert not leaves.is_alive()


def test_without_machine_0_the_others_end(store: TCPStore) -> None:
    proxy = socket.create_server(("127.0.0.1", 0))
    with proxy:
        waits = Meeting(
            "127.0.0.1", proxy.getsockname()[1], 1, 2, told={}, has_store=False, has_met=lambda: False, end=print
        )
        waits._lifeline = socket.create_connection(proxy.getsockname())
        waits._lifeline.setblocking(False)
        waits._store = PrefixStore(meeting.PREFIX, store)
        accepted, _ = proxy.accept()
        assert waits._look() == ""
        accepted.close()
        assert waits._look().startswith("Machine 0 has ended while")
        waits._lifeline.close()


def test_what_happens_after_the_processes_have_met_is_theirs_to_say(store: TCPStore) -> None:
    leaves, _ = part(store, 1, has_met=lambda: True)
    leaves.leave(3)
    assert not store.check([f"{meeting.PREFIX}/1"])


def test_a_launch_that_ends_after_they_have_met_takes_no_other_with_it(store: TCPStore) -> None:
    fails, _ = part(store, 1)
    store.wait([f"{meeting.PREFIX}/1"])
    fails.leave(3)
    met = iter([False])  # when it is looked at, and met a moment later
    waits, said = part(store, 2, has_met=lambda: next(met, True))
    store.set(f"{meeting.PREFIX}/{meeting.FAULT}", "Machine 1 ended with exit status 3")
    waits._thread.join()
    waits.leave(0)
    assert (said.empty(), waits.fault) == (True, "")


REACHING = """
import sys
from accel_cli.launch.network import wait_until_reached
wait_until_reached(sys.argv[1], 29511, listens_here=sys.argv[2] == "here", seconds=-1)
"""


@needs_namespaces
@pytest.mark.parametrize(
    ("machine", "address", "where", "reason"),
    [
        (0, ADDRESSES[0], "here", ""),
        (1, ADDRESSES[0], "there", ""),  # refused
        (0, ADDRESSES[1], "here", f"'{ADDRESSES[1]}' is not an address of this machine, which is machine 0"),
        (1, "10.79.0.77", "there", "Machine 0 does not answer at 10.79.0.77:29511 (No route to host)"),
        (1, "10.80.0.1", "there", "Machine 0 does not answer at 10.80.0.1:29511 (Network is unreachable)"),
    ],
)
def test_an_address_that_leads_nowhere(machine: int, address: str, where: str, reason: str) -> None:
    with two_machines("reach") as machines:
        done = run("ip", "netns", "exec", machines[machine], sys.executable, "-c", REACHING, address, where)
    assert (done.returncode == 0) == (not reason), done.stderr
    assert reason in done.stderr


WORLD = """
from accelerate import Accelerator
state = Accelerator(cpu=True)
print("rank", state.process_index, "of", state.num_processes, "local", state.local_process_index, flush=True)
"""


@pytest.mark.takes_turns
@pytest.mark.launch
@pytest.mark.parametrize("command", [["-m", "accel_cli", "launch", "--cpu"], []], ids=["launch", "python"])
@pytest.mark.parametrize("cluster", ["Kubeflow", "SLURM"])
def test_two_nodes_make_one_world(tmp_path: Path, command: list[str], cluster: str) -> None:
    (tmp_path / "train.py").write_text(WORLD)
    (port,) = map(str, free_ports(1))
    running = []
    for node in (0, 1):
        variables = {
            "Kubeflow": KUBEFLOW
            | {"PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port},
            "SLURM": step(2, node=node) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        }[cluster]  # fmt: skip
        environ = {**os.environ, **NO_DEVICES, **variables, "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(subprocess.Popen([sys.executable, *command, "train.py"], env=environ, **pipes))
    printed = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], printed
    assert "rank 0 of 2 local 0" in printed[0]
    assert "rank 1 of 2 local 0" in printed[1]
