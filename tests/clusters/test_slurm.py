"""Real jobs on a SLURM of two nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.slurm import Slurm, slurm, wait_for, why_not

pytestmark = [
    pytest.mark.launch,
    pytest.mark.thorough,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a cluster can be started"),
]

WORLD = """
import os
from accelerate import Accelerator
from accelerate.utils import gather_object
accelerator = Accelerator(cpu=True)
ranks = gather_object([(accelerator.process_index, accelerator.local_process_index, os.uname().nodename)])
if accelerator.is_main_process:
    print("world", ranks)
"""
TWO_NODES = "world [(0, 0, 'n1'), (1, 0, 'n2')]"
ON_TWO = ["--nodes", "2", "--cpu", "--num_processes", "2", "--cpus_per_task", "1"]
FOUR = "world [(0, 0, 'n1'), (1, 1, 'n1'), (2, 0, 'n2'), (3, 1, 'n2')]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as started:
        yield started


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WORLD)


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("-N2 -n2 accelerate launch --cpu --num_processes 2 train.py", TWO_NODES),
        ("-N2 --ntasks-per-node=1 accelerate launch --cpu --num_processes 4 train.py", FOUR),
        ("-N2 --ntasks-per-node=2 accelerate launch --cpu train.py", FOUR),
        ("-N2 --ntasks-per-node=2 python train.py", FOUR),
        ("-N1 -n1 accelerate launch --cpu train.py", "world [(0, 0, 'n1')]"),
    ],
)
def test_a_step_is_one_world(cluster: Slurm, words: str, world: str) -> None:
    done = cluster.run("srun", *words.split())
    assert (done.returncode, [line for line in done.stdout.splitlines() if line.startswith("world")]) == (
        0,
        [world],
    ), done.stderr


def test_a_rendezvous_that_gives_the_ranks_is_one_world(cluster: Slurm) -> None:
    words = "--num_processes 2 --num_machines 2 --machine_rank 0 --rdzv_backend c10d --main_process_ip n1 --main_process_port 28511"
    done = cluster.run("srun", "-N2", "-n2", "accelerate", "launch", "--cpu", *words.split(), "train.py")
    assert [line for line in done.stdout.splitlines() if line.startswith("world")] in (
        [TWO_NODES],
        ["world [(0, 0, 'n2'), (1, 0, 'n1')]"],
    ), done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "-N2 -n2 accelerate launch --cpu --num_machines 1 --num_processes 2",
            "--num_machines is 1: the nodes would train apart",
        ),
        ("-N2 --ntasks-per-node=2 accelerate launch --cpu --num_processes 2", "that would be 4 separate runs"),
        (
            "-N2 -n2 env -u SLURM_PROCID accelerate launch --cpu",
            "SLURM_STEP_NUM_TASKS='2' is set, and SLURM_PROCID is not",
        ),
        (
            "-N2 -n2 accelerate launch --cpu --main_process_ip nowhere.invalid",
            "'nowhere.invalid', has no address on this machine",
        ),
    ],
)
def test_what_would_train_apart_or_wait_for_ever_is_refused(cluster: Slurm, words: str, reason: str) -> None:
    done = cluster.run("srun", *words.split(), "train.py")
    assert done.returncode != 0
    assert "world" not in done.stdout
    assert reason in done.stderr


def test_two_jobs_on_one_node_have_ports_of_their_own(cluster: Slurm) -> None:
    words = ["--nodes", "1", "--cpu", "--num_processes", "1", "--cpus_per_task", "1", "train.py"]
    jobs = [cluster.submit(*words), cluster.submit(*words)]
    for job in jobs:
        wait_for(lambda job=job: cluster.state(job) in ("COMPLETED", "FAILED"))  # type: ignore[misc]
        assert cluster.state(job) == "COMPLETED", Path(f"train-{job}.out").read_text()


def test_slurm_accepts_every_option(cluster: Slurm) -> None:
    words = ["--cpu", "--time", "1-0:10", "--partition", "low", "--job_name", "a.b", "--requeue",
             "--sbatch_option=--mem=1", "--sbatch_option=--comment='two words'", "train.py"]  # fmt: skip
    done = cluster.run("accelerate", "slurm", "--submit", "--dry_run", *words)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_runs_on_two_processes(cluster: Slurm, nodes: int) -> None:
    shutil.copy(Path(__file__).parents[1] / "cli" / "launched.py", "train.py")
    words = ["--nodes", str(nodes), "--cpu", "--num_processes", "2", "--cpus_per_task", "1"]
    job = cluster.submit(*words, "train.py", "a b", "$HOME")
    wait_for(lambda: cluster.state(job) in ("COMPLETED", "FAILED"))
    said = Path(f"train-{job}.out").read_text()
    assert cluster.state(job) == "COMPLETED", said
    printed = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    local_ranks = ["0", "1"] if nodes == 1 else ["0", "0"]
    places = [[rank, "cpu", local_rank] for rank, local_rank in enumerate(local_ranks)]
    assert printed == {"places": places, "precision": "no", "argv": ["a b", "$HOME"]}


def test_a_preempted_job_starts_again_and_resumes(cluster: Slurm) -> None:
    Path("train.py").write_text(
        "import sys, time\n"
        "open(f'run{len(sys.argv)}', 'w').close()\n"
        "time.sleep(0 if '--resume' in sys.argv else 100)\n"
    )
    everything = ["--nodes", "2", "--cpu", "--num_processes", "2", "--cpus_per_task", "2"]
    job = cluster.submit(*everything, "--requeue", "--resume_args=--resume", "train.py")
    wait_for(Path("run1").exists)
    cluster.submit(*everything, "--partition", "high", "train.py", "--resume", "now")
    wait_for(lambda: cluster.state(job) == "PENDING")
    assert "is requeued after 0 restarts" in Path(f"train-{job}.out").read_text()

    def has_completed() -> bool:
        cluster.run(
            "scontrol", "update", f"JobId={job}", "StartTime=now"
        )  # SLURM waits for two minutes after a requeue
        return cluster.state(job) == "COMPLETED"

    wait_for(has_completed)
    assert Path("run2").exists()


def test_a_cancelled_or_failed_job_does_not_start_again(cluster: Slurm) -> None:
    Path("train.py").write_text("import time\nopen('started', 'w').close()\ntime.sleep(100)\n")
    job = cluster.submit("--cpu", "--cpus_per_task", "1", "--requeue", "train.py")
    wait_for(Path("started").exists)
    cluster.run("scancel", job)
    wait_for(lambda: cluster.state(job) == "CANCELLED")
    for code in (3, 75):  # 75 without a signal would be requeued for ever
        Path("train.py").write_text(f"import sys; sys.exit({code})")
        job = cluster.submit("--cpu", "--cpus_per_task", "1", "--requeue", "train.py")
        wait_for(lambda job=job: cluster.state(job) == "FAILED")  # type: ignore[misc]
        assert cluster.about(job)["ExitCode"] == f"{code}:0"


SAVING = """
import signal, sys, time
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed
set_seed(0)
before = signal.getsignal(signal.SIGTERM)
folders = ProjectConfiguration("run", automatic_checkpoint_naming=True, save_on_signals="SIGTERM")
loaders = DataLoaderConfiguration(use_stateful_dataloader=True)
accelerator = Accelerator(cpu=True, project_config=folders, dataloader_config=loaders)
model = torch.nn.Linear(1, 1)
numbers = torch.utils.data.DataLoader(torch.rand(40, 1), batch_size=1, shuffle=True)
model, optimizer, numbers = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), numbers)
is_resumed = "--resume" in sys.argv
if is_resumed:
    accelerator.resume()
for step, number in enumerate(numbers):
    accelerator.backward(model(number).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("step", flush=True)
    time.sleep(0.3 if "--slowly" in sys.argv else 0)
    while "--waits" in sys.argv and not is_resumed and step == 3 and signal.getsignal(signal.SIGTERM) is not before:
        time.sleep(0.1)
if accelerator.is_main_process:
    print("weight", accelerator.unwrap_model(model).weight.item())
"""


@pytest.fixture(scope="module")
def undisturbed(cluster: Slurm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weight of a run of `SAVING` on two nodes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.py").write_text(SAVING)
    printed = cluster.run("srun", "-N2", "-n2", f"--chdir={folder}", "python", "train.py").stdout.splitlines()
    (weight,) = [line for line in printed if line.startswith("weight")]  # the other node's lines may come later
    return weight


def test_a_job_that_is_signalled_saves_and_the_next_one_goes_on_where_it_was(cluster: Slurm, undisturbed: str) -> None:
    Path("train.py").write_text(SAVING)
    for number, to_whom in enumerate(([], ["--batch"])):  # the processes, or the shell that runs the script
        job = cluster.submit(*ON_TWO, "train.py", "--slowly", *(["--resume"] if number else []))
        output = Path(f"train-{job}.out")
        wait_for(lambda output=output: output.exists() and output.read_text().count("step") >= 3)  # type: ignore[misc]
        cluster.run("scancel", "--signal=TERM", *to_whom, job)
        wait_for(lambda job=job: cluster.state(job) == "FAILED")  # type: ignore[misc]
        assert len(list(Path("run/checkpoints").iterdir())) == number + 1
    job = cluster.submit(*ON_TWO, "train.py", "--resume")
    wait_for(lambda: cluster.state(job) == "COMPLETED")
    assert undisturbed in Path(f"train-{job}.out").read_text().splitlines()


def test_a_cancelled_job_may_save_before_it_ends(cluster: Slurm) -> None:
    Path("train.py").write_text(SAVING)
    job = cluster.submit(*ON_TWO, "train.py", "--slowly")
    output = Path(f"train-{job}.out")
    wait_for(lambda: output.exists() and output.read_text().count("step") >= 3)
    cluster.run("scancel", job)
    wait_for(lambda: cluster.state(job) == "CANCELLED")
    wait_for(lambda: cluster.run("squeue", "-h", "-j", job).stdout == "")
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["checkpoint_0"]


@pytest.mark.thorough
@pytest.mark.parametrize("reason", ["signalled", "at its time limit"])
def test_a_job_on_two_nodes_is_requeued_and_goes_on(cluster: Slurm, undisturbed: str, reason: str) -> None:
    Path("train.py").write_text(SAVING)
    words = [*ON_TWO, "--time", "30", "--grace_seconds", "180", "--requeue"]
    job = cluster.submit(*words, "--resume_args=--resume", "train.py", "--waits")
    output = Path(f"train-{job}.out")
    wait_for(lambda: output.exists() and output.read_text().count("step") >= 4)
    if reason == "signalled":
        cluster.run("scancel", "--signal=TERM", job)
    else:  # which is now nearer than the seconds by which the batch shell is warned; SLURM looks every half minute
        cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=3")
    wait_for(lambda: cluster.state(job) == "PENDING")
    assert "is requeued after 0 restarts" in output.read_text()
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["checkpoint_0"]
    again = ("TimeLimit=30", "StartTime=now")  # SLURM would wait for two minutes
    cluster.run("scontrol", "update", f"JobId={job}", *again)
    wait_for(lambda: cluster.state(job) == "COMPLETED")
    assert undisturbed in output.read_text().splitlines()
