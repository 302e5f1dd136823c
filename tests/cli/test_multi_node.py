"""Training across two machines."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_state.interfaces import interface_of, own_address
from tests.cli.running import PROGRAM
from tests.support.machines import ADDRESSES, inside, needs_namespaces, two_machines

SCRIPT = str(Path(__file__).parent / "resuming.py")
HOSTS = ("first", "second")


def begin(machine: str, host: str, command: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Begin a command on a machine of this name; nobody says which network interface to use, unless the variables do."""
    environ = {name: text for name, text in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    return subprocess.Popen(
        inside(machine, host, command), cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder), **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def start(
    machines: tuple[str, str], rank: int, folder: Path, *words: str, pause: float = 0, script: Path | None = None
) -> subprocess.Popen[str]:
    """Launch one machine's part; nobody says who is the host."""
    meeting = f"--main_process_ip {ADDRESSES[0]} --main_process_port 29511 --num_machines 2 --machine_rank {rank}"
    started = script or f"{SCRIPT} {folder} {pause}"
    command = f"{PROGRAM} launch --cpu --num_processes 2 {meeting} {' '.join(words)} {started}"
    return begin(machines[rank], HOSTS[rank], command, folder)


def finish(process: subprocess.Popen[str]) -> dict[str, object]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found: dict[str, object] = json.loads(next((line for line in out.splitlines() if line.startswith("{")), "{}"))
    return found


@needs_namespaces
@pytest.mark.launch
@pytest.mark.takes_turns("other machines")
def test_two_machines_train_together(tmp_path: Path) -> None:
    with two_machines("nodes") as machines:
        parts = [start(machines, rank, tmp_path, "--same_network") for rank in (0, 1)]
        found = [finish(part) for part in parts]
    assert found[0]["names"] == list(HOSTS)
    assert found[0]["bias"] == pytest.approx(-0.8), "eight steps of 0.1 against a gradient of 1"
    assert found[1] == {}


STARTED_BY_HAND = """
from accelerate import Accelerator
from accelerate.utils import gather_object
accelerator = Accelerator(cpu=True)
print(gather_object([accelerator.process_index]))
"""


@needs_namespaces
@pytest.mark.launch
@pytest.mark.takes_turns("other machines")
def test_without_a_launcher_machines_meet_on_the_network_of_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STARTED_BY_HAND)
    meeting = {
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29512",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    command = f"{sys.executable} {script}"
    with two_machines("byhand") as machines:
        parts = [
            begin(machines[rank], f"no-address-{rank}.invalid", command, tmp_path, **meeting, RANK=str(rank))
            for rank in (0, 1)
        ]
        for part in parts:
            out, errors = part.communicate(timeout=120)
            assert part.returncode == 0, errors
            assert out.splitlines()[-1] == "[0, 1]", "before it, gloo of torch 2.9 says that it is connected"


FAILS_ON_MACHINE_1 = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit(3)
from accelerate import Accelerator
Accelerator(cpu=True)
"""


@needs_namespaces
@pytest.mark.launch
@pytest.mark.takes_turns("other machines")
def test_a_machine_that_fails_before_processes_meet_ends_the_other_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ON_MACHINE_1)
    with two_machines("fails") as machines:
        parts = [start(machines, rank, tmp_path, script=script) for rank in (0, 1)]
        errors = [part.communicate(timeout=200)[1] for part in parts]
    assert [part.returncode for part in parts] == [1, 3], errors
    assert "Machine 1 ended with exit status 3 while the run was starting" in errors[0]


@pytest.mark.thorough
@needs_namespaces
@pytest.mark.launch
def test_ranks_that_wait_for_another_machine_in_vain(tmp_path: Path) -> None:
    """The watcher's notes reach the other machine; the last of its two ranks leaves out a call."""
    script = tmp_path / "train.py"
    script.write_text(LEAVES_OUT_A_CALL)
    with two_machines("vain") as machines:
        parts = [start(machines, rank, tmp_path, "--num_processes 4", script=script) for rank in (0, 1)]
        said = [part.communicate(timeout=300) for part in parts]
    assert [part.returncode for part in parts] == [1, 1], said
    assert all("done" not in out for out, _ in said)
    table = next(errors for _, errors in said if "deadlock. " in errors)
    assert re.search(rf"^3 +wait_for_everyone.*{script}:7 in <module>$", table, re.MULTILINE), table
    assert re.search(rf"^[012, ]+ gather.*{script}:6 in <module>$", table, re.MULTILINE), table


LEAVES_OUT_A_CALL = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
if accelerator.process_index != 3:
    accelerator.gather(torch.ones(3))
accelerator.wait_for_everyone()
accelerator.print("done")
"""


@pytest.mark.thorough
@needs_namespaces
@pytest.mark.launch
def test_a_machine_that_dies_comes_back_and_the_run_goes_on(tmp_path: Path) -> None:
    elastic = ("--rdzv_backend", "c10d", "--max_restarts", "3", "--monitor_interval", "0.5")
    with two_machines("again") as machines:
        stays, dies = (start(machines, rank, tmp_path, *elastic, pause=0.3) for rank in (0, 1))
        reached = tmp_path / "second.step"
        while not (reached.exists() and reached.read_text() >= "2"):
            assert stays.poll() is None, stays.communicate()[1]
            time.sleep(0.1)
        os.killpg(dies.pid, signal.SIGKILL)
        dies.communicate()
        comes_back = start(machines, 1, tmp_path, *elastic, pause=0.3)
        found, _ = finish(stays), finish(comes_back)
    assert found["names"] == list(HOSTS)
    assert int(str(found["first"])) >= 2, "it did not begin anew"
    assert found["bias"] == pytest.approx(-0.8), "and no step was taken twice"


@pytest.mark.thorough
@needs_namespaces
@pytest.mark.launch
def test_deepspeeds_own_launcher_on_two_machines(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "hosts").write_text("first slots=1\nsecond slots=1\n")
    (tmp_path / "train.py").write_text(WITH_DEEPSPEED)
    command = f"{PROGRAM} launch --cpu --use_deepspeed --zero_stage 2 --num_processes 2 --num_machines 2"
    command += f" --deepspeed_hostfile hosts --deepspeed_multinode_launcher nossh --main_process_ip {ADDRESSES[0]}"
    path = f"{Path(PROGRAM).parent}{os.pathsep}{os.environ['PATH']}"  # where the program deepspeed is
    with two_machines("ds") as machines:
        parts = [
            begin(machines[rank], HOSTS[rank], f"{command} --machine_rank {rank} train.py", tmp_path, PATH=path)
            for rank in (0, 1)
        ]
        found = [finish(part) for part in parts]
    assert found[0] == found[1]
    assert (found[0]["engine"], found[0]["stage"], found[0]["processes"]) == ("deepspeed", 2, 2)
    assert found[0]["bias"] == pytest.approx(-0.4), "four steps of 0.1 against a gradient of 1"


WITH_DEEPSPEED = """
import json, sys, torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD([model.bias], lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward((model(batch) - model.module.weight).sum())
    optimizer.step()
stage, bias = model.zero_optimization_stage(), round(model.module.bias.item(), 5)
found = {"engine": accelerator.engine.name, "stage": stage, "processes": accelerator.num_processes, "bias": bias}
sys.stdout.write(json.dumps(found) + "\\n")
accelerator.end_training()
"""


def test_addresses_of_this_machine() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no.such.host.invalid") is None
    if sys.platform.startswith("linux"):
        assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert socket.inet_aton(str(own_address("127.0.0.1")))
