"""`accelerate test`: a real run, and what happens when a check fails."""

from __future__ import annotations

import os
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from accel_cli.launch import command
from accel_cli.launch.plan import Plan
from accel_cli.main import main
from accel_cli.selftest import script_path
from accelerate.commands.test import test_command as run_test_command
from accelerate.state import PartialState
from accelerate.test_utils.scripts.checks import running
from accelerate.test_utils.scripts.checks.check import Check, Process, SkippedError
from accelerate.test_utils.scripts.checks.running import Result, Team, run_check, run_checks
from accelerate.test_utils.scripts.checks.training import train_alone
from accelerate.test_utils.scripts.test_script import CHECKS
from accelerate.utils import DistributedType, gather, gather_object
from tests.cli.running import PROGRAM, refusal, run
from tests.support.output import own_lines
from tests.support.ranks import ranks


def works(process: Process) -> None:
    assert gather_object([process.rank]) == list(range(process.world))


def fails_on_the_last(process: Process) -> None:
    """The last process fails, and the others wait for it in vain."""
    if process.rank == process.world - 1:
        raise ValueError("a mistake")
    gather(torch.ones(1))


def has_no_meaning(process: Process) -> None:
    raise SkippedError("not here")


def fails_everywhere(process: Process) -> None:
    raise ValueError("the same mistake")


@pytest.mark.launch
@pytest.mark.takes_turns("ways to start")
def test_everything_works_on_two_processes(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("{distributed_type: MULTI_CPU, num_processes: 2, use_cpu: true, main_process_port: 0}")
    folders = {"HF_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = run(PROGRAM, "test", "--config_file", str(settings), OMP_NUM_THREADS="1", **folders)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = own_lines(done.stdout)
    assert lines[0] == "2 processes, MULTI_CPU, cpu, mixed precision no"
    assert lines[-1] == "Launching works on this machine."
    assert f"{len(CHECKS)} ok, 0 failed, 0 skipped in " in done.stdout
    areas = {line.partition("  ")[0] for line in lines}
    assert {"collectives", "data loaders", "checkpoints", "mixed precision", "random numbers"} <= areas
    assert not list(tmp_path.glob("accelerate-test-*"))


def test_one_process_runs_every_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert run_checks(CHECKS) == 0
    said = capsys.readouterr()
    assert said.out.startswith("1 process, NO, cpu, mixed precision no\n")
    assert " 0 failed" in said.out
    assert said.err == ""


@pytest.mark.thorough
@ranks(2)
def test_a_failure_names_its_ranks_and_the_others_still_run(rank: int, world: int) -> None:
    running.TIMEOUT = timedelta(seconds=20)  # in which a busy machine joins its processes, too
    team = Team(PartialState())
    team.rejoin()  # for the short timeout
    process = Process(rank, world, DistributedType.MULTI_CPU)
    rows = {function: Check("area", function.__name__, function) for function in (works, fails_on_the_last)}
    failed = run_check(rows[fails_on_the_last], process, team)
    assert failed.status == "failed"
    assert sorted(failed.said) == [0, 1]  # the first one says that it waited in vain
    assert "ValueError: a mistake" in failed.said[1]
    assert "a mistake" not in failed.said[0]
    assert run_check(rows[works], process, team).status == "ok"
    PartialState().destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.PrefixStore("end", team.store), rank=rank, world_size=world
    )


def test_the_report_and_the_exit_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    functions = {"one": works, "two": has_no_meaning, "three": fails_everywhere}
    rows = [Check("area", name, function) for name, function in functions.items()]
    assert run_checks(rows) == 1
    said = capsys.readouterr()
    table = [line.split() for line in said.out.splitlines()]
    assert ["area", "two", "skipped", "0.00", "not", "here"] in table
    assert "1 ok, 1 failed, 1 skipped in " in said.out
    assert "area, three: failed on rank 0 of 1\nTraceback" in said.err
    assert "ValueError: the same mistake" in said.err
    assert run_checks(rows[:2]) == 0  # what is skipped has not failed


def test_ranks_that_say_the_same_are_named_together() -> None:
    result = Result(Check("area", "name", works), "failed", 0.1, {0: "oh", 1: "no", 2: "oh\n"})
    said = running.complaint(result, 4)
    assert said.split("\n\n")[:2] == [
        "\narea, name: failed on rank 0, 2 of 4\noh",
        "area, name: failed on rank 1 of 4\nno",
    ]


def test_training_that_goes_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.test_utils.scripts.checks import training

    def shifted(batch: int, accumulation: int, clip: bool) -> dict[str, torch.Tensor]:
        return {name: value + 0.01 for name, value in train_alone(batch, accumulation, clip).items()}

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(training, "train_alone", shifted)
    assert run_checks(training.TRAINING) == 1
    assert "parameter '0.weight'" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "said"), [(0, "Launching works"), (5, "failed with exit status 5")])
def test_the_command_launches_the_script(
    status: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(command, "run_plan", lambda plan: plans.append(plan) or status)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    settings = tmp_path / "a.yaml"
    settings.write_text("{distributed_type: MULTI_CPU, num_processes: 3, use_cpu: true}")
    assert main(["test", "--config-file", str(settings)]) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert plans[0].argv[-1] == script_path()
    assert os.path.isfile(script_path())
    assert "--nproc_per_node=3" in plans[0].argv
    assert run_test_command(Namespace(config_file=str(settings))) == status


def test_settings_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "test", "--config_file", "no.yaml")
    assert said.startswith("accelerate test: error: Config file 'no.yaml' does not exist")


def test_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package accelerate"):
        script_path()
