"""`accelerate slurm`: the batch script. Real jobs are in tests/clusters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.main import COMMANDS, main
from accel_cli.slurm.job import Job, make_job
from accel_cli.slurm.script import batch_script, sbatch_quoted
from tests.cli.running import refusal

GOLDEN = Path(__file__).parent / "golden"
GPUS = ["--nodes", "2", "--gpus_per_node", "a100:8"]


@pytest.fixture(autouse=True)
def in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (folder / "train.py").write_text("")


def job_of(*words: str) -> Job:
    return make_job(COMMANDS["slurm"].make_parser().parse_args([*words]), {"HF_HOME": "/nowhere"})


def script_of(*words: str) -> str:
    return batch_script(job_of(*words))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "slurm_gpus.sh",
            [*GPUS, "--time", "1-12:00:00", "--partition", "a,b", "--account", "lab", "--qos=high",
             "--sbatch_option=--mem=0", "--setup", "module load cuda", "--setup", "source 'my env/bin/activate'",
             "--mixed-precision", "bf16", "--use_fsdp", "--fsdp_version", "2", "train.py", "--name", "it's", "$HOME"],
        ),
        (
            "slurm_requeue.sh",
            ["--cpu", "--num_processes", "4", "--job_name", "again", "--time", "30", "--requeue", "--grace_seconds", "60",
             "--resume_args=--resume 'the latest'", "-m", "train", "--epochs", "3"],
        ),
    ],
)  # fmt: skip
def test_the_whole_script(name: str, words: list[str]) -> None:
    found = script_of(*words).replace(os.getcwd(), "/home/me/my run")
    wanted = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        wanted.write_text(found)
    assert found == wanted.read_text()
    subprocess.run(["bash", "-n"], input=found, text=True, check=True)


STARTED = 'while [ "$1" != bash ]; do shift; done; SLURM_NODEID={node} exec "$@"'


def run_job(text: str, folder: Path, programs: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script with programs of ours in the place of SLURM's."""
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    environ = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "1",
    } | variables  # fmt: skip
    return subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, check=False)


def run_script(text: str, folder: Path, **variables: str) -> list[str]:
    """Run a batch script with programs that only say how they were called; return the words of `accelerate`."""
    programs = {
        "scontrol": '[ "$1 $2 $3" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"', "srun": STARTED.format(node=1),
        "accelerate": f'{sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"',
    }  # fmt: skip
    job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[3-4]"} | variables
    words: list[str] = json.loads(run_job(text, folder, programs, **job).stdout)
    return words


def test_every_word_arrives_as_it_was_typed(tmp_path: Path) -> None:
    nasty = ["a b", "$HOME", "`id`", "it's", '"', "*", "", "--flag=\\", "é\n2"]
    found = run_script(script_of("--nodes", "2", "--cpu", "--num_processes", "4", "train.py", *nasty), tmp_path)
    assert found == [
        "launch", "--machine_rank", "1", "--num_machines", "2", "--num_processes", "4", "--main_process_ip", "n3",
        "--main_process_port", "22345", "--cpu", "train.py", *nasty,
    ]  # fmt: skip


def test_the_script_is_told_when_the_job_has_been_started_again(tmp_path: Path) -> None:
    text = script_of("--nodes", "2", "--cpu", "--resume_args", "--resume 'a b'", "--requeue", "train.py", "-x")
    assert run_script(text, tmp_path)[-2:] == ["train.py", "-x"]
    assert run_script(text, tmp_path, SLURM_RESTART_COUNT="0")[-2:] == ["train.py", "-x"]
    assert run_script(text, tmp_path, SLURM_RESTART_COUNT="2")[-4:] == ["train.py", "-x", "--resume", "a b"]


@pytest.mark.parametrize(
    ("launch", "is_requeued"),
    [("kill -TERM $PPID; exit 75", True), ("exit 75", False), ("kill -TERM $PPID; exit 3", False)],
    ids=["asked to end", "by itself", "failed"],
)
def test_a_job_is_requeued_when_its_processes_were_asked_to_end(
    launch: str, is_requeued: bool, tmp_path: Path
) -> None:
    """A script that ends with 75 by itself would be requeued for ever."""
    programs = {
        "scontrol": '[ "$1" = requeue ] && echo requeued; [ "$1" = show ] && echo " JobState=RUNNING"',
        "srun": STARTED.format(node=0), "accelerate": launch, "sleep": ":",
    }  # fmt: skip
    text = script_of("--cpu", "--num_processes", "1", "--requeue", "train.py")
    done = run_job(text, tmp_path, programs)
    assert ("requeued" in done.stdout) is is_requeued
    assert done.returncode == (3 if launch.endswith("3") else 75)


def test_the_launch_gets_the_flags_that_were_given() -> None:
    job = job_of(
        *GPUS, "--rdzv-backend", "c10d", "--max_restarts=2", "--debug", "--main_process_port", "777", "train.py"
    )
    assert set(job.launch_words) == {"--rdzv_backend=c10d", "--max_restarts=2", "--debug"}
    assert job.port == 777
    assert job_of(*GPUS, "--main_process_port", "0", "train.py").port is None
    assert "aws" not in script_of(*GPUS, "--aws_secret_access_key", "hush", "train.py")


def test_the_settings_file_counts() -> None:
    Path("settings.yaml").write_text(
        "{distributed_type: MULTI_GPU, num_machines: 3, num_processes: 12, main_process_port: 1234, machine_rank: 1}"
    )
    job = job_of("--config_file", "settings.yaml", "train.py")
    assert (job.nodes, job.num_processes, job.gpus_per_node, job.port) == (3, 12, "4", 1234)
    assert job.launch_words == ("--config_file", os.path.abspath("settings.yaml"))
    more = job_of("--config_file", "settings.yaml", "--gpus_per_node", "8", "train.py")
    assert (more.nodes, more.num_processes) == (3, 24)
    fewer = job_of("--config_file", "settings.yaml", "--nodes", "1", "--gpus_per_node", "2", "train.py")
    assert (fewer.nodes, fewer.num_processes) == (1, 2)


def test_cores() -> None:
    assert job_of(*GPUS, "train.py").cpus_per_task == 32
    assert job_of(*GPUS, "--num_cpu_threads_per_process", "6", "train.py").cpus_per_task == 48
    assert job_of(*GPUS, "--cpus_per_task", "5", "train.py").cpus_per_task == 5
    assert job_of("--cpu", "--num_processes", "4", "--nodes", "2", "train.py").cpus_per_task == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "The number of GPUs per machine is missing. Give --gpus_per_node, or --cpu for none."),
        (["--time", "1h", "--cpu", "train.py"], "--time must be a time limit of SLURM"),
        (["--time", "1:00\n#SBATCH --x", "--cpu", "train.py"], "--time must be"),
        (["--partition", "a;rm", "--cpu", "train.py"], "--partition must be a partition"),
        (["--account", "a b", "--cpu", "train.py"], "--account must be the name of an account, got 'a b'"),
        (["--job_name", "a b", "--cpu", "train.py"], "--job_name must be"),
        (["--gpus_per_node", "many", "train.py"], "--gpus_per_node must be"),
        (["--sbatch_option=--mem=0\n#SBATCH -x", "--cpu", "train.py"], "--sbatch_option must be"),
        (["--sbatch_option=mem=0", "--cpu", "train.py"], "--sbatch_option must be"),
        (["--nodes", "0", "--cpu", "train.py"], "--nodes must be at least 1, got 0"),
        (["--requeue", "--no-requeue", "--cpu", "train.py"], "--requeue and --no_requeue contradict one another"),
        (["--cpu", "--gpus_per_node", "2", "train.py"], "--cpu and --gpus_per_node contradict one another"),
        (["--nodes", "2", "--num_machines", "3", "--cpu", "train.py"], "--nodes 2 and --num_machines 3 contradict"),
        ([*GPUS, "--num_processes", "4", "train.py"], "--num_processes 4 and --gpus_per_node 8 contradict"),
        (["--machine_rank", "1", "--cpu", "train.py"], "--machine_rank is set by the job itself on the machines"),
        (["--main_process_ip", "h", "--cpu", "train.py"], "--main_process_ip is set by the job itself on the machines"),
        (["--resume_args", "'", "--cpu", "train.py"], "--resume_args \"'\" cannot be split as in a shell"),
        (["--tpu", "train.py"], "cannot be combined with the launcher 'tpu' of these settings"),
        (["--cpu", "tain.py"], "Did you mean 'train.py'?"),
        (["--cpu", "--num_processes", "3", "--nodes", "2", "train.py"], "got 3 processes and 2 machines"),
        (["--cpu", "--submit", "train.py"], "needs the program 'sbatch'"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.getcwd())
    assert message in refusal(capsys, "slurm", *words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: 'NO'\nuse_cpu: true\n", "--gpus_per_node a100:8 contradicts use_cpu: True"),
        (
            "debug: false\ndistributed_type: MULTI_CPU\n",
            "--gpus_per_node a100:8 contradicts distributed_type: MULTI_CPU",
        ),
    ],
)
def test_a_file_for_the_cpu_is_named_with_its_key(
    text: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`accelerate config default` writes such a file where there is no GPU, as on most login nodes."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    path.write_text(text)
    error = refusal(capsys, "slurm", *GPUS, "train.py")
    assert said in error
    assert f"Config file {str(path)!r}, line 2" in error
    assert "Write use_cpu: false" in error
    path.unlink()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert "environment variable ACCELERATE_USE_CPU" in refusal(capsys, "slurm", *GPUS, "train.py")


@pytest.mark.parametrize("limit", ["90", "90:00", "12:00:00", "2-0", "2-12:30", "2-12:30:15", "UNLIMITED"])
def test_time_limits(limit: str) -> None:
    assert f"#SBATCH --time={limit}\n" in script_of("--cpu", "--time", limit, "train.py")


def test_printing_writing_and_submitting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["slurm", "--cpu", "train.py"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    assert "requeue" not in printed  # left to the cluster
    assert main(["slurm", "--cpu", "--no_requeue", "--output", "job.sh", "train.py"]) == 0
    assert "#SBATCH --no-requeue\n" in Path("job.sh").read_text()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "Batch script written to job.sh\n")
    Path("sbatch").write_text('#!/bin/sh\necho "$@" > given; cat >> given; exit 3\n')
    Path("sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", os.getcwd(), prepend=":")
    assert main(["slurm", "--cpu", "--submit", "--dry_run", "train.py"]) == 3
    assert Path("given").read_text() == "--test-only\n" + printed


def test_quoting_for_sbatch() -> None:
    assert sbatch_quoted("/a/b-1.2") == "/a/b-1.2"
    assert sbatch_quoted('a "b" \\ c') == '"a \\"b\\" \\\\ c"'
