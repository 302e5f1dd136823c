"""Manifests for Kubernetes: what they contain, and that their pods train together."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_cli.errors import UsageError
from accel_cli.kubernetes.manifest import documents
from accel_cli.kubernetes.workload import make_workload
from accel_cli.main import COMMANDS, main
from tests.cli.pretended import settled
from tests.clusters.kubernetes import check, pods
from tests.support.machines import ADDRESSES, inside, needs_namespaces, two_machines

KINDS = ("job", "trainjob")
SETTINGS = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
machine_rank: 0
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_cpu_ram_efficient_loading: false
"""
EVERYTHING = (
    "--volume runs:/runs --volume data:/data --shared_memory 16Gi --pod_env HF_HOME=/runs/a=b --memory 64Gi --cpus 500m"
    " --namespace team --name a-run"
)


def manifest(kind: str, *words: str, environ: dict[str, str] | None = None) -> list[dict[str, Any]]:
    args = COMMANDS["kubernetes"].make_parser().parse_args(["--kind", kind, "--image", "image:1", *words])
    text = yaml.safe_dump_all(documents(make_workload(args, environ or {"HF_HOME": os.devnull}), kind))
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_would_accept_it(kind: str) -> None:
    for words in (
        ["--cpu", "--num_processes", "1"],
        ["--gpus_per_node", "8"],
        ["--gpus_per_node", "8", "--num_machines", "3", "--gpu_resource", "amd.com/gpu", *EVERYTHING.split()],
    ):
        found = manifest(kind, *words, "/app/My_train.2.py", "--lr", "0.1")
        check(found)
    assert found[-1]["metadata"] == {"name": "a-run", "namespace": "team"}
    text = yaml.safe_dump(found[-1])
    for part in ("amd.com/gpu: '8'", "claimName: data", "mountPath: /dev/shm", "value: /runs/a=b", "memory: 64Gi"):
        assert part in text


@pytest.mark.parametrize("kind", KINDS)
def test_pods_get_the_settings_of_the_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(SETTINGS)
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    for rank, (_, command, environ) in enumerate(
        pods(manifest(kind, "--config_file", str(file), script, "--lr", "0.1"))
    ):
        assert command[:2] == ["accelerate", "launch"]
        settings, plan = settled(*command[2:], environ=environ)
        assert (settings.num_machines, settings.machine_rank, settings.num_processes) == (2, rank, 16)
        there, same = settled(
            "--config_file", str(file), "--machine_rank", str(rank), "--main_process_ip", str(settings.main_process_ip),
            "--main_process_port", str(settings.main_process_port), script, "--lr", "0.1", environ={},
        )  # fmt: skip
        assert there.num_processes == 16
        assert plan.environment == same.environment
        assert plan.argv == same.argv


DOLLARS = ["$(HOME)", "$(PET_NNODES)", "$$(A)", "$$", "$$$", "a$", "$HOME ${HOME}", "$", "$($(A))", "$$(PET_NNODES)$"]


@pytest.mark.parametrize("kind", KINDS)
def test_dollars_arrive_as_they_were_written(kind: str) -> None:
    words = [word for value in DOLLARS for word in ("--pod_env", f"V{DOLLARS.index(value)}={value}")]
    two = ["--cpu", "--num_processes", "2", "--num_machines", "2"]
    _, command, environ = next(pods(manifest(kind, *two, *words, "train.py", *DOLLARS)))
    assert command[-len(DOLLARS) :] == DOLLARS
    assert [environ[f"V{number}"] for number in range(len(DOLLARS))] == DOLLARS
    plain = yaml.safe_dump(manifest(kind, *two, "train.py", "$HOME and $"))
    assert "$HOME and $" in plain
    assert "$$" not in plain, "what Kubernetes leaves alone is written as it is"


def test_nothing_is_said_of_accelerators_that_were_not_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--image", "image:1", "--gpus_per_node", "8", "--num_machines", "2", "train.py"]
    assert main(["kubernetes", *words]) == 0
    assert "accelerator found" not in capsys.readouterr().err


def test_failures_and_evictions_are_told_apart() -> None:
    job = manifest("job", "--cpu", "--num_machines", "2", "--num_processes", "2", "--pod_restarts", "3", "train.py")[
        -1
    ]
    assert job["spec"]["backoffLimit"] == 6
    evicted, saved = job["spec"]["podFailurePolicy"]["rules"]
    assert evicted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert saved["onExitCodes"]["values"] == [75]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--name", "A_b"], "--name must be a name of at most 50 lower-case letters"),
        (["--memory", "3GB"], "--memory must be a quantity of Kubernetes, such as 64Gi, got '3GB'"),
        (["--volume", "runs"], "such as runs:/runs, got 'runs'"),
        (["--volume", "a:/x", "--volume", "b:/x"], "cannot be mounted at one path"),
        (["--pod_env", "HF-HOME=x"], "--pod_env must be a variable and its value"),
        (["--machine_rank", "0", "--main_process_ip", "head"], "--main_process_ip has no meaning in a manifest"),
        (["--launcher", "ray"], "--launcher has no meaning in a manifest"),
        (["--kind", "trainjob", "--pod_restarts", "1"], "--pod_restarts needs --kind job"),
        (["--num_machines", "2"], "The number of GPUs of each pod is missing"),
        (
            ["--gpus_per_node", "2", "--num_processes", "3"],
            "num_processes is 3, and --gpus_per_node 2 on 1 machines makes 2",
        ),
        (["--gpus_per_node", "2", "--cpu"], "--cpu and --gpus_per_node contradict"),
    ],
)
def test_what_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        manifest("job", *words, "train.py")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["train.py", "--image", "me/train:1"], "--image stands after train.py, so it is passed to the script"),
        (["train.py"], "--image is needed: the image of the containers"),
    ],
)
def test_without_an_image_nothing_is_printed(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kubernetes", *words]) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert said.out == ""


WORLD = """
import os
from accelerate import Accelerator
from accelerate.utils import gather_object
accelerator = Accelerator()
places = gather_object([(accelerator.process_index, accelerator.local_process_index, os.uname().nodename)])
accelerator.print(places)
"""


@needs_namespaces
@pytest.mark.launch
@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "each"), [("job", 1), ("trainjob", 2)])
def test_pods_train_together(kind: str, each: int, tmp_path: Path) -> None:
    """Each pod is a machine, with the environment of the manifest and nothing else, and knows the others by their names."""
    script = tmp_path / "train.py"
    script.write_text(WORLD)
    words = f"--cpu --num_machines 2 --num_processes {2 * each} --pod_env OMP_NUM_THREADS=1"
    started = list(pods(manifest(kind, *words.split(), str(script))))
    hosts = "".join(f"{address} {name}\n" for address, (name, _, _) in zip(ADDRESSES, started, strict=True))
    with two_machines(kind) as machines:
        folders = [Path("/etc/netns") / machine for machine in machines]
        for folder in folders:  # files that `ip netns exec` puts over those of /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        try:
            running = [
                subprocess.Popen(
                    inside(machine, name.partition(".")[0], shlex.join(command)),
                    env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HOME": str(tmp_path), **environ},
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for machine, (name, command, environ) in zip(machines, started, strict=True)
            ]  # fmt: skip
            said = [pod.communicate(timeout=300) for pod in running]
        finally:
            for folder in folders:
                (folder / "hosts").unlink()
                folder.rmdir()
    assert [pod.returncode for pod in running] == [0, 0], said
    names = [name.partition(".")[0] for name, _, _ in started]
    places = [(each * node + local, local, name) for node, name in enumerate(names) for local in range(each)]
    assert [out for out, _ in said] == [f"{places}\n"] * 2  # once on each machine
