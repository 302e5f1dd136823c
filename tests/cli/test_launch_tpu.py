"""TPUs: this machine's, a pod's, and commands for a pod. A stand-in takes the place of torch_xla and of gcloud."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel_cli.launch.command import launch_command_parser
from accel_cli.launch.plan import Plan
from accel_cli.launch.runners import tpu
from accel_cli.main import main
from accel_cli.tpu import tpu_command_launcher, tpu_command_parser
from accelerate.commands import launch as old_launch
from accelerate.utils import launch as old_utils
from tests.cli.pretended import plan_of, settings_of
from tests.cli.running import PROGRAM, refusal, run

SCRIPT = """
import json, os, sys

def main():
    names = ("XLA_USE_BF16", "ACCELERATE_MIXED_PRECISION", "FORK_LAUNCHED")
    print(json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))

def train():
    print("train")
"""
SPAWN = "def spawn(function, args=(), nprocs=None):\n    print('nprocs', nprocs, flush=True)\n    function(0, *args)\n"


@pytest.fixture(autouse=True)
def script(tmp_path: Path, in_a_folder_with_a_script: None) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)


@pytest.fixture
def torch_xla(tmp_path: Path) -> dict[str, str]:
    """An environment in which a stand-in for torch_xla is installed; it calls the function once."""
    site = tmp_path / "site"
    for name, text in {
        "torch_xla/distributed/xla_multiprocessing.py": SPAWN,
        "torch_xla-2.9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n",
    }.items():
        (site / name).parent.mkdir(parents=True)
        (site / name).write_text(text)
    return {"PYTHONPATH": str(site)}


def launch(*words: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run(PROGRAM, "launch", "--tpu", *words, **environ)


@pytest.mark.launch
def test_a_function_of_the_script_is_called(torch_xla: dict[str, str]) -> None:
    done = launch("--mixed_precision", "bf16", "train.py", "--lr", "1", environ=torch_xla)
    assert done.returncode == 0, done.stderr
    count, said = done.stdout.splitlines()
    assert count == "nprocs None"  # torch_xla takes all cores
    assert json.loads(said) == {
        "argv": ["--lr", "1"], "XLA_USE_BF16": None, "ACCELERATE_MIXED_PRECISION": "bf16", "FORK_LAUNCHED": "1",
    }  # fmt: skip
    words = ["--num_processes", "1", "--main_training_function", "train", "-m", "train"]
    assert launch(*words, environ=torch_xla).stdout.splitlines() == ["nprocs 1", "train"]
    alone = launch(*words, environ=torch_xla | {"XLA_USE_SPMD": "1"})
    assert alone.stdout.splitlines() == ["train"], alone.stderr  # SPMD: this process drives all cores
    done = launch("--main_training_function", "trian", "train.py", environ=torch_xla)
    assert done.returncode == 2
    assert "'train.py' has no function 'trian'" in done.stderr
    assert "Did you mean 'train'?" in done.stderr


def test_without_torch_xla(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    said = refusal(capsys, "launch", "--tpu", "train.py")
    assert "--tpu needs the library 'torch_xla', which is not installed" in said
    monkeypatch.setattr(sys, "argv", [])
    assert tpu.main(["train.py"]) == 2
    assert "TPUs need the library 'torch_xla'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--mixed_precision", "bf16"], {}),  # autocast does it, and keeps parameters in float32
        (
            ["--mixed_precision", "bf16", "--downcast_bf16"],
            {"XLA_DOWNCAST_BF16": "1", "ACCELERATE_DOWNCAST_BF16": "true"},
        ),
        ([], {}),
    ],
)
def test_what_torch_xla_must_find(words: list[str], variables: dict[str, str]) -> None:
    found = plan_of("--tpu", *words, "train.py").environment
    assert {name: text for name, text in found.items() if "XLA" in name or "DOWNCAST" in name} == variables


def pod(**values: object) -> str:
    Path("a.json").write_text(json.dumps({"distributed_type": "XLA", "tpu_use_cluster": True, **values}))
    return "a.json"


def test_a_pod() -> None:
    file = pod(tpu_name="pod", num_processes=8, tpu_vm=["a", "b"], tpu_env=["Q=2"], tpu_use_sudo=True, debug=True,
               mixed_precision="bf16", main_training_function="train")  # fmt: skip
    plan = plan_of("--config_file", file, "train.py", "--lr", "1")
    assert plan.runner == "tpu_pod"
    assert " ".join(plan.argv[1:]) == (
        "-m torch_xla.distributed.xla_dist --tpu pod --vm a --vm b --env Q=2 "
        "--env ACCELERATE_IN_TPU_POD=1 --env ACCELERATE_DEBUG_MODE=true --restart-tpuvm-pod-server -- "
        "sudo accelerate-launch --tpu --no_tpu_cluster --num_machines 1 --mixed_precision bf16 --dynamo_backend no "
        "--num_processes 8 --main_training_function train train.py --lr 1"
    )
    assert plan.environment == {}


def test_what_the_pods_machines_run_is_understood_there() -> None:
    plan = plan_of("--config_file", pod(tpu_name="pod", num_processes=8), "-m", "json.tool")
    words = plan.argv[plan.argv.index("accelerate-launch") + 1 :]
    there = settings_of(*words)
    assert (there.runner, there.module, there.num_processes) == ("tpu", True, 8)


@pytest.mark.launch
def test_a_pod_needs_an_older_torch_xla(torch_xla: dict[str, str]) -> None:
    file = pod(tpu_name="pod", num_processes=8)
    done = launch("--config_file", file, "--tpu_cluster", "train.py", environ=torch_xla)
    assert done.returncode == 2
    assert "accelerate tpu-config --command" in done.stderr
    program = Path("site/torch_xla/distributed/xla_dist.py")
    program.write_text("import sys\nprint(sys.argv[1:])\n")
    done = launch("--config_file", file, "--tpu_cluster", "train.py", environ=torch_xla)
    assert done.stdout.startswith("['--tpu', 'pod', '--env', 'ACCELERATE_IN_TPU_POD=1'")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tpu", "--no_python", "ls"], "--no_python and --tpu exclude one another"),
        (["--tpu", "--tpu_cluster", "train.py"], "Set tpu_name in the config file"),
        (["--tpu", "--cpu", "train.py"], "--cpu and --tpu exclude one another"),
        (["--tpu", "--mpirun_hostfile", "h", "train.py"], "--mpirun_hostfile and --tpu contradict"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(*words)


def test_functions_for_programs(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    args = launch_command_parser().parse_args(["--tpu", "--mixed_precision", "bf16", "--debug", "train.py"])
    given = {"Q": "1"}
    assert old_utils.prepare_tpu(args, given) == (args, given)
    assert given == {"Q": "1", "ACCELERATE_DEBUG_MODE": "true"}
    args.tpu_vm, args.tpu_name = ["a"], "pod"
    old_utils.prepare_tpu(args, {}, True)
    assert (args.vm, args.tpu) == (["a"], "pod")

    monkeypatch.setitem(sys.modules, "torch_xla", sys)
    parse = launch_command_parser().parse_args
    old_launch.tpu_launcher(parse(["train.py"]))
    old_launch.tpu_pod_launcher(Namespace(**vars(parse(["train.py"])), tpu_name="pod"))
    assert [plan.runner for plan in plans] == ["tpu", "tpu_pod"]


# ---- accelerate tpu-config ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        (["--command", "echo hi"], "echo hi"),
        (["--command", "echo", "hi", "--command", "ls -l"], "echo; hi; ls -l"),
        (["--command_file", "commands"], "echo one; echo two"),
        (["--command", "ls", "--install-accelerate"], "pip install accelerate -U; ls"),
        (["--command", "ls", "--install_accelerate", "--accelerate_version", "0.12.0"],
         "pip install accelerate==0.12.0; ls"),
    ],
)  # fmt: skip
def test_commands_for_a_pod(words: list[str], commands: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("commands").write_text("echo one\n\n  echo two\n")
    assert main(["tpu-config", "--tpu_name", "pod", "--tpu-zone", "z", *words, "--debug"]) == 0
    assert capsys.readouterr().out == (
        f"Running gcloud compute tpus tpu-vm ssh pod --zone z --command cd /usr/share; {commands} --worker all\n"
        f"gcloud compute tpus tpu-vm ssh pod --zone z --command 'cd /usr/share; {commands}' --worker all\n"
    )


def test_the_newest_commit_is_that_of_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = "tpu-config --tpu_name pod --tpu_zone z --command ls"
    words = f"{pod} --install_accelerate --accelerate_version dev --debug".split()
    others = distribution("accel-of-others", "https://x.org/y")
    distributions = [distribution("accel-cli"), distribution("accelerate"), others]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: distributions)
    said = refusal(capsys, *words[:-1])
    assert "this build of accel-cli does not name its repository. Give a version" in said
    distributions[:2] = [distribution(name, "https://example.org/it") for name in ("accelerate", "accel-cli")]
    assert main(words) == 0
    packages = " ".join(
        f"'{name} @ git+https://example.org/it#subdirectory=packages/{name}'" for name in ("accel-cli", "accelerate")
    )
    assert f"cd /usr/share; pip install {packages}; ls" in capsys.readouterr().out.splitlines()[0]


def distribution(name: str, repository: str | None = None) -> SimpleNamespace:
    metadata = Message()
    if repository:
        metadata["Project-URL"] = "Homepage,https://x.org"  # as some write it
        metadata["Project-URL"] = f"Repository, {repository}"
    return SimpleNamespace(name=name, metadata=metadata)


def test_the_settings_file_says_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    file = pod(tpu_name="mine", tpu_zone="zone", commands=["a", "b"], num_processes=8)
    assert main(["tpu-config", "--config_file", file, "--use_alpha", "--debug"]) == 0
    assert capsys.readouterr().out.startswith("Running gcloud alpha compute tpus tpu-vm ssh mine --zone zone ")
    assert main(["tpu-config", "--config_file", file, "--tpu_name", "other", "--command", "c", "--debug"]) == 0
    assert "ssh other --zone zone --command 'cd /usr/share; c'" in capsys.readouterr().out
    Path("home/accelerate").mkdir(parents=True)
    Path("a.json").rename("home/accelerate/default_config.yaml")
    assert main(["tpu-config", "--debug"]) == 0
    assert "cd /usr/share; a; b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tpu_zone", "z", "--command", "ls"], "--tpu_name is missing"),
        (["--tpu_name", "n", "--command", "ls"], "--tpu_zone is missing"),
        (["--tpu_name", "n", "--tpu_zone", "z"], "Give --command or --command_file"),
        (["--tpu_name", "n", "--tpu_zone", "z", "--command_file", "no"], "'no' does not exist"),
        (["--tpu_name", "n", "--tpu_zone", "z", "--command_file", "."], "'.' cannot be read"),
        (["--config_file", "no"], "'no' does not exist"),
    ],
)
def test_mistakes_about_a_pod(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, "tpu-config", *words)


def test_gcloud_is_really_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["tpu-config", "--tpu_name", "n", "--tpu_zone", "z", "--command", "ls"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 2
    assert "program 'gcloud' is not installed" in capfd.readouterr().err
    (tmp_path / "gcloud").write_text('#!/bin/sh\necho "$9"; exit ${STATUS:-0}\n')
    (tmp_path / "gcloud").chmod(0o755)
    tpu_command_launcher(tpu_command_parser().parse_args(words[1:]))
    assert capfd.readouterr().out.startswith("cd /usr/share; ls\n")
    monkeypatch.setenv("STATUS", "3")
    assert main(words) == 3
