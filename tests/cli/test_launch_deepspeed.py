"""DeepSpeed: its processes under torch's agent, or under its own launchers."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import pytest

from accel_cli.launch.command import launch_command_parser, run_plan
from accel_cli.launch.plan import Plan
from accel_cli.launch.runners.deepspeed import LAUNCHERS, forwarded
from accel_cli.main import main
from accelerate.commands import launch as old_launch
from accelerate.utils import launch as old_utils
from tests.cli.pretended import Pretended, plan_of
from tests.cli.running import refusal

SEVERAL = ["--use_deepspeed", "--num_machines", "2", "--num_processes", "8", "--deepspeed_hostfile", "hosts"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, in_a_folder_with_a_script: None) -> None:
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")


def test_one_machine_is_torchs_agent() -> None:
    plan = plan_of("--use_deepspeed", "--num_processes", "2", "train.py", "--lr", "1")
    assert plan.runner == "torchrun"
    assert "--nproc_per_node=2" in plan.argv
    assert plan.environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert plan_of("--use_deepspeed", "--num_processes", "1", "train.py").runner == "torchrun"


def test_everything_reaches_the_script() -> None:
    words = {
        "zero_stage": ("3", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"),
        "offload_optimizer_device": ("nvme", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme"),
        "offload_param_device": ("NVME", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme"),
        "offload_optimizer_nvme_path": ("/NVMe/o", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/NVMe/o"),
        "offload_param_nvme_path": ("/NVMe/p", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/NVMe/p"),
        "gradient_accumulation_steps": ("auto", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"),
        "gradient_clipping": ("1.0", "ACCELERATE_GRADIENT_CLIPPING", "1.0"),
        "zero3_init_flag": ("True", "ACCELERATE_DEEPSPEED_ZERO3_INIT", "true"),
        "zero3_save_16bit_model": ("True", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true"),
        "deepspeed_moe_layer_cls_names": ("Moe,Other", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Moe,Other"),
        "deepspeed_config_file": ("ds.json", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json"),
        "mixed_precision": ("bf16", "ACCELERATE_MIXED_PRECISION", "bf16"),
    }
    flags = [word for name, (value, _, _) in words.items() for word in (f"--{name}", value)]
    environment = plan_of("--use_deepspeed", "--num_processes", "2", *flags, "train.py").environment
    assert {variable: environment[variable] for _, variable, _ in words.values()} == {
        variable: text for _, variable, text in words.values()
    }


def test_modules_of_this_folder_are_found_elsewhere() -> None:
    words = ["--use_deepspeed", "--num_processes", "2", "train.py"]
    assert plan_of(*words).environment["PYTHONPATH"] == str(Path.cwd())
    paths = plan_of(*words, environ={"PYTHONPATH": "/mine"}).environment["PYTHONPATH"]
    assert paths == f"/mine{os.pathsep}{Path.cwd()}"


def test_what_the_settings_file_says_is_named() -> None:
    section = {"zero_stage": 2, "deepspeed_config_file": "ds.json", "zero3_init_flag": False}
    values = {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "bf16"}
    Path("a.json").write_text(json.dumps(values | {"deepspeed_config": section}))
    environment = plan_of("--config_file", "a.json", "train.py").environment
    assert environment["ACCELERATE_CONFIG_DS_FIELDS"] == (
        "zero_stage,deepspeed_config_file,zero3_init_flag,mixed_precision"
    )
    assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "--no_local_rank --launcher pdsh --num_gpus 4 --master_port 29500"),
        (["--main_process_ip", "10.0.0.1", "--main_process_port", "9", "--deepspeed_multinode_launcher", "OpenMPI"],
         "--no_local_rank --launcher openmpi --master_addr 10.0.0.1 --master_port 9"),
        (["--deepspeed_inclusion_filter", "a:0,1@b:2"],
         "--no_local_rank --launcher pdsh --include a:0,1@b:2 --master_port 29500"),
        (["--deepspeed_exclusion_filter", "b:0"],
         "--no_local_rank --launcher pdsh --exclude b:0 --master_port 29500"),
        (["--deepspeed_multinode_launcher", "nossh", "--machine_rank", "1"],
         "--no_local_rank --node_rank 1 --no_ssh --num_gpus 4 --master_port 29500"),
    ],
)  # fmt: skip
def test_several_machines_are_deepspeeds(words: list[str], command: str) -> None:
    plan = plan_of(*SEVERAL, *words, "train.py", "--lr", "1")
    assert plan.runner == "deepspeed"
    assert " ".join(plan.argv) == f"deepspeed --hostfile hosts {command} train.py --lr 1"


@pytest.mark.parametrize(
    ("words", "kind"), [(["-m", "json.tool"], "--module"), (["--no_python", "ls"], "--no_python")]
)
def test_modules_and_programs(words: list[str], kind: str) -> None:
    assert plan_of(*SEVERAL, *words).argv[-2:] == (kind, words[1])


def test_standard_is_torchs_agent_on_every_machine() -> None:
    meeting = ["--main_process_ip", "10.0.0.1", "--main_process_port", "9", "--machine_rank", "1", "--same_network"]
    words = [*SEVERAL, "--deepspeed_multinode_launcher", "standard", *meeting]
    plan = plan_of(*words, "train.py")
    assert plan.runner == "torchrun"
    assert {"--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=9"} <= set(plan.argv)
    without_list = plan_of(*SEVERAL[:-2], *meeting, "train.py")
    assert without_list.argv == plan.argv


def test_the_hostfile_counts_the_machines() -> None:
    plan = plan_of("--use_deepspeed", "--num_processes", "4", "--deepspeed_hostfile", "hosts", "train.py")
    assert plan.argv[6:8] == ("--num_gpus", "2")


def test_the_other_machines_get_the_environment_but_no_secrets() -> None:
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "y", "HOME": "/root", "SSH_TTY": "1",
               "EMPTY": "", "WITH_LINES": "a\nb", "PATH": "/bin"}  # fmt: skip
    assert forwarded(environ).keys() == {"NCCL_DEBUG", "WITH_LINES", "PATH"}
    plan = plan_of(*SEVERAL, "train.py", environ=environ)
    ((path, text),) = plan.files
    assert plan.environment["DS_ENV_FILE"] == str(Path(path).absolute())
    lines = text.splitlines()
    assert {"NCCL_DEBUG=INFO", "PATH=/bin", "ACCELERATE_USE_DEEPSPEED=true"} <= set(lines)
    assert not [line for line in lines if line.startswith(("HF_TOKEN", "AWS", "HOME", "WITH_LINES"))]


def test_the_users_own_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    Path("home").mkdir()
    Path("home/.deepspeed_env").write_text("MINE=home\nTHEIRS=1=2\n\nno variable\n")
    Path(".deepspeed_env").write_text("MINE=here\nACCELERATE_USE_DEEPSPEED=no\nPATH=/there\n")
    ((_, text),) = plan_of(*SEVERAL, "train.py", environ={"PATH": "/here"}).files
    lines = text.splitlines()
    assert {"MINE=here", "THEIRS=1=2", "ACCELERATE_USE_DEEPSPEED=true", "PATH=/there"} <= set(lines)
    assert len({line.partition("=")[0] for line in lines}) == len(lines)
    Path(".deepspeed_env").unlink()
    Path(".deepspeed_env").mkdir()
    with pytest.raises(ValueError, match="'.deepspeed_env' cannot be read"):
        plan_of(*SEVERAL, "train.py")


def test_processes_that_mpi_starts_know_the_first() -> None:
    plan = plan_of(*SEVERAL, "--deepspeed_multinode_launcher", "mpich", "train.py")
    assert (plan.environment["MASTER_ADDR"], plan.environment["MASTER_PORT"]) == ("a", "29500")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SEVERAL, "--deepspeed_multinode_launcher", "psdh"], "'psdh' is not one of .* Did you mean 'pdsh'"),
        ([*SEVERAL[:-2], "--deepspeed_multinode_launcher", "pdsh"], "Give --deepspeed_hostfile, or use .* standard"),
        (["--use_deepspeed", "--deepspeed_config_file", "no.json"], "DeepSpeed configuration 'no.json' does not exist"),
        (["--use_deepspeed", "--zero_stage", "4"], "--zero_stage: 4 is not one of 0, 1, 2, 3"),
        (["--use_deepspeed", "--offload_param_device", "disk"], "'disk' is not one of none, cpu, nvme"),
        ([*SEVERAL, "--deepspeed_inclusion_filter", "a", "--deepspeed_exclusion_filter", "b"],
         "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter contradict one another"),
        ([*SEVERAL, "--deepspeed_multinode_launcher", "openmpi", "--deepspeed_inclusion_filter", "a"],
         "--deepspeed_inclusion_filter and --deepspeed_multinode_launcher openmpi exclude one another"),
        (["--use_deepspeed", "--num_processes", "2", "--deepspeed_hostfile", "hosts",
          "--deepspeed_multinode_launcher", "mpich"], "each of the 8 slots of .* but --num_processes is 2"),
        (["--use_deepspeed", "--mpirun_hostfile", "hosts"], "--mpirun_hostfile and --use_deepspeed contradict"),
        (["--use_deepspeed", "--deepspeed_hostfile", "hosts", "--num_machines", "3", "--num_processes", "3"],
         "--num_machines 3 is more than the machines in --deepspeed_hostfile 'hosts': a, b"),
        (["--use_deepspeed", "--deepspeed_hostfile", "hosts", "--num_processes", "10"],
         "10 processes on 2 machines are 5 on each, and --deepspeed_hostfile 'hosts' has 4 slots for 'a'"),
    ],
)  # fmt: skip
def test_mistakes(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(*words, "train.py")


def test_a_configuration_may_be_base64() -> None:
    encoded = base64.urlsafe_b64encode(b'{"zero_optimization": {"stage": 2}}').decode()
    words = ["--use_deepspeed", "--num_processes", "2", "--deepspeed_config_file", encoded, "train.py"]
    assert plan_of(*words).environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == encoded


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    said = refusal(capsys, "launch", "--use_deepspeed", "--num_processes", "2", "train.py")
    assert "pip install 'accelerate[deepspeed]'" in said
    assert main(["launch", "--dry_run", "--use_deepspeed", "--num_processes", "2", "train.py"]) == 0
    args = launch_command_parser().parse_args(["--num_processes", "2", "train.py"])
    with pytest.raises(ValueError, match="'deepspeed', which is not installed"):
        old_launch.deepspeed_launcher(args)


def test_functions_for_programs(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = launch_command_parser().parse_args
    command, environment = old_utils.prepare_deepspeed_cmd_env(parse([*SEVERAL, "train.py"]))
    assert command is not None
    assert command[:3] == ["deepspeed", "--hostfile", "hosts"]
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert "PATH" in environment
    assert old_utils.prepare_deepspeed_cmd_env(parse(["--num_processes", "2", "train.py"]))[0] is None
    assert not list(Path().glob(".*deepspeed_env"))

    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    monkeypatch.setattr("shutil.which", lambda name: name)
    old_launch.deepspeed_launcher(parse([*SEVERAL, "train.py"]))
    assert plans[0].runner == "deepspeed"


def test_the_launcher_is_really_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the program `deepspeed` notes what it was given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("deepspeed", "pdsh"):
        (tools / name).write_text('#!/bin/sh\necho "$@" > called\ncp "$DS_ENV_FILE" read\nexit 7\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    assert main(["launch", *SEVERAL, "train.py"]) == 7
    assert Path("called").read_text().split()[:3] == ["--hostfile", "hosts", "--no_local_rank"]
    assert "ACCELERATE_USE_DEEPSPEED=true" in Path("read").read_text()
    assert {path.name for path in Path().iterdir()} == {"tools", "called", "read", "train.py", "ds.json", "hosts"}


def test_a_request_to_end_reaches_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "long").write_text(
        "#!/bin/sh\ntrap 'echo ended > ended; exit 9' TERM\nkill -TERM $PPID\nwhile :; do :; done\n"
    )
    (tmp_path / "long").chmod(0o755)
    plan = Plan("deepspeed", ("./long",), {}, files=(("variables", "A=1"),))
    assert run_plan(plan) == 9
    assert Path("ended").exists()
    assert not Path("variables").exists()


def test_a_launcher_without_its_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    for launcher in LAUNCHERS.values():
        if launcher.program:
            said = refusal(capsys, "launch", *SEVERAL, "--deepspeed_multinode_launcher", launcher.name, "train.py")
            assert f"needs the program {launcher.program!r}" in said


@pytest.mark.parametrize("words", [["--cpu"], []])
def test_on_the_cpu(words: list[str]) -> None:
    plan = plan_of("--use_deepspeed", *words, "--num_processes", "2", "train.py", machine=Pretended())
    assert plan.environment.get("ACCELERATE_USE_CPU") == ("True" if words else None)
