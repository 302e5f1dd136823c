"""Carrying out plans: exit statuses, and what the launcher says when something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.run as agent
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

import accel_state.devices
from accel_cli.launch.plan import Plan
from accel_cli.launch.runners import simple, torchrun

TAKEN = DistNetworkError("The server socket has failed to listen. name: EADDRINUSE, message: address already in use")


def python(code: str, **variables: str) -> Plan:
    return Plan("simple", (sys.executable, "-c", code), variables)


def several(**rest: Any) -> Plan:
    words = ("--nproc_per_node=2", "--master_addr=127.0.0.1", "--master_port=29500", "x.py", "--nnodes=9")
    environment = rest.pop("environment", {"ACCELERATE_USE_CPU": "True"})
    return Plan("torchrun", (sys.executable, "-m", "torch.distributed.run", *words), environment, **rest)


@pytest.fixture
def agent_does(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Namespace]]:
    """Let torch's agent do nothing but raise these errors, one per call."""

    def prepare(*errors: BaseException | None) -> list[Namespace]:
        calls: list[Namespace] = []
        todo = list(errors)

        def run(arguments: Namespace) -> None:
            calls.append(arguments)
            arguments.seen = os.environ.get("ACCELERATE_USE_CPU")
            error = todo.pop(0) if todo else None
            if error is not None:
                raise error

        monkeypatch.setattr(agent, "run", run)
        return calls

    return prepare


def test_the_status_of_one_process() -> None:
    assert simple.run(python("")) == 0
    assert simple.run(python("import os, sys; sys.exit(int(os.environ['STATUS']))", STATUS="5")) == 5
    assert simple.run(python("import os; os.kill(os.getpid(), 9)")) == 137


def test_a_program_that_cannot_start(tmp_path: Any) -> None:
    (tmp_path / "no_program").write_text("x")
    plan = Plan("simple", (str(tmp_path / "no_program"),), {})
    for start in (simple.run, simple.become):
        with pytest.raises(ValueError, match="no_program' cannot be started: Permission denied"):
            start(plan)


def test_becoming_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *words: seen.extend(words))
    simple.become(python("", MARK="1"))
    assert seen[0] == sys.executable
    assert seen[2]["MARK"] == "1"


def test_waiting_goes_on_while_an_interrupted_script_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen.wait
    answers = iter([KeyboardInterrupt])

    def wait(self: Any, timeout: float | None = None) -> int:
        for error in answers:
            raise error
        return real(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    assert simple.run(python("import sys; sys.exit(4)")) == 4


def test_all_processes_end_well(agent_does: Callable[..., list[Namespace]]) -> None:
    calls = agent_does()
    assert torchrun.run(several()) == 0
    assert (calls[0].nproc_per_node, calls[0].training_script_args) == ("2", ["--nnodes=9"])
    assert calls[0].seen == "True"
    assert "ACCELERATE_USE_CPU" not in os.environ


@pytest.mark.parametrize(
    ("code", "status", "how"),
    [(3, 3, "ended with exit status 3"), (-9, 137, "was killed by SIGKILL"), (-6, 134, "was killed by SIGABRT")],
)
def test_the_first_failure_is_reported(
    agent_does: Callable[..., list[Namespace]], capsys: pytest.CaptureFixture[str], code: int, status: int, how: str
) -> None:
    failure = ProcessFailure(local_rank=1, pid=77, exitcode=code, error_file="none")
    failure.timestamp = int(time.time())
    for quiet in (False, True):
        agent_does(ChildFailedError("x.py", {1: failure}))
        assert torchrun.run(several(quiet=quiet)) == status
        said = capsys.readouterr().err
        assert (f"process 1 (pid 77) {how}" in said) is not quiet


def test_an_interrupted_launch(agent_does: Callable[..., list[Namespace]]) -> None:
    agent_does(SignalException("stopped", signal.SIGTERM))
    assert torchrun.run(several()) == 143


def test_another_port_is_taken_when_the_guess_was_too_late(agent_does: Callable[..., list[Namespace]]) -> None:
    calls = agent_does(TAKEN, TAKEN)
    assert torchrun.run(several(port_may_change=True)) == 0
    ports = [call.master_port for call in calls]
    assert ports[0] == 29500
    assert len(set(ports)) == 3


@pytest.mark.parametrize(
    ("errors", "may_change", "message"),
    [
        ([TAKEN], False, "Port 29500 of this machine is taken"),
        ([TAKEN] * 3, True, "Port .* of this machine is taken"),
        ([RendezvousError("nobody came\nmore")], True, r"The rendezvous at 127.0.0.1:29500 failed: nobody came$"),
    ],
)
def test_processes_that_cannot_meet(
    agent_does: Callable[..., list[Namespace]], errors: list[BaseException], may_change: bool, message: str
) -> None:
    agent_does(*errors)
    with pytest.raises(ValueError, match=message):
        torchrun.run(several(port_may_change=may_change))


@pytest.mark.parametrize(
    ("kind", "found", "environment", "refused"),
    [
        ("cuda", 1, {}, True),
        ("cuda", 2, {}, False),
        ("cuda", 1, {"CUDA_VISIBLE_DEVICES": "0,1"}, False),
        ("cuda", 1, {"ACCELERATE_USE_CPU": "1"}, False),
        ("cpu", 1, {}, False),
    ],
)
def test_two_processes_never_share_a_device(
    agent_does: Callable[..., list[Namespace]], monkeypatch: pytest.MonkeyPatch, kind: str, found: int,
    environment: dict[str, str], refused: bool,
) -> None:  # fmt: skip
    agent_does()
    variable = "CUDA_VISIBLE_DEVICES" if kind == "cuda" else None
    here = SimpleNamespace(name=kind, device_count=lambda: found, visible_devices_variable=variable)
    monkeypatch.setattr(accel_state.devices, "detect_device_kind", lambda: here)
    plan = several(environment=environment)
    if refused:
        with pytest.raises(ValueError, match="2 processes need 2 cuda devices, but this machine has 1"):
            torchrun.run(plan)
    else:
        assert torchrun.run(plan) == 0
