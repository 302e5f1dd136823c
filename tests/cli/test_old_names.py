"""Functions that programs which build launches themselves call."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from accel_cli.launch.command import launch_command_parser
from accel_cli.launch.machine import Machine
from accel_cli.launch.plan import Plan
from accelerate.commands import launch as old_launch
from accelerate.commands.config import config_args, default_config_file
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils import launch as old_utils


@pytest.fixture(autouse=True)
def without_default_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def parse(*words: str) -> Any:
    return launch_command_parser().parse_args([*words, "x.py"])


def test_command_and_environment() -> None:
    command, environment = old_utils.prepare_simple_launcher_cmd_env(parse("--cpu", "--mixed_precision", "bf16"))
    assert command == [sys.executable, "x.py"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "PATH" in environment
    environment = old_utils.prepare_multi_gpu_env(parse("--use_fsdp", "--num_processes", "2"))
    assert environment["FSDP_VERSION"] == "1"


def test_adding_variables() -> None:
    given = {"A": "1"}
    words = ["--use_parallelism_config", "--parallelism_config_cp_size", "2", "--mixed_precision", "fp8"]
    assert old_utils.prepare_extend_env_parallelism_config(parse(*words), given) is given
    assert given["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    assert old_utils.setup_fp8_env(parse(*words), given)["ACCELERATE_FP8_FORMAT"] == "HYBRID"


def test_one_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        old_launch.simple_launcher(parse("--cpu"))


def test_one_process_may_have_an_agent(plans: list[Plan]) -> None:
    old_launch.multi_gpu_launcher(parse("--num_processes", "1"))
    assert plans[0].runner == "torchrun"
    assert "--nproc_per_node=1" in plans[0].argv


def test_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert old_launch.clean_option("--num-processes") == "num_processes"
    assert old_launch.clean_option("-q") is None
    assert old_launch.options_to_group["use_fsdp"] == "FSDP Arguments"
    monkeypatch.setenv("SOME_PATHS", "/a:/b")
    assert old_utils.env_var_path_add("SOME_PATHS", "/c") == "/a:/b:/c"
    assert old_utils.env_var_path_add("NO_PATHS", "/c") == "/c"
    assert config_args.default_config_file == default_config_file
    parser = CustomArgumentParser()
    parser.add_argument_group("x").add_argument("--two_words")
    assert vars(parser.parse_args(["--two-words", "1"])) == {"two_words": "1", "nondefault": {"two_words"}}


# ---- settling -----------------------------------------------------------------------------------------------------


def settings_file(folder: Path, **values: Any) -> str:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_arguments_are_settled_in_place(tmp_path: Path) -> None:
    file = settings_file(tmp_path, distributed_type="FSDP", num_processes=4, debug=True, mixed_precision="bf16",
                         fsdp_config={"fsdp_sync_module_states": False})  # fmt: skip
    args = parse("--config_file", file, "--num_processes", "2")
    settled, config, from_file = old_launch._validate_launch_command(args)
    assert settled is args
    assert isinstance(config, config_args.ClusterConfig)
    assert (config.num_processes, from_file) == (4, True)
    assert (args.num_processes, args.debug, args.use_fsdp, args.use_cpu) == (2, True, True, False)
    assert (args.fsdp_sync_module_states, args.num_machines, args.main_process_port) == (False, 1, None)
    before = dict(vars(args))
    assert old_launch._validate_launch_command(args)[0] is args
    assert vars(args) == before
    args = parse("--config_file", file, "--mixed_precision", "fp16")
    assert old_launch._validate_launch_command(args)[2] is False


def test_settling_without_a_file() -> None:
    args, config, from_file = old_launch._validate_launch_command(parse("--cpu", "--main_process_port", "0"))
    assert (config, from_file) == (None, False)
    assert (args.use_cpu, args.mixed_precision, args.num_processes, args.main_process_port) == (True, "no", 1, 0)
    assert old_utils.prepare_simple_launcher_cmd_env(args)[1]["KMP_BLOCKTIME"] == "1"
    args, _, _ = old_launch._validate_launch_command(parse("--num_processes", "1", "--main_process_port", "4321"))
    assert (args.use_cpu, args.main_process_port) == (False, 4321)
    with pytest.raises(ValueError, match="exclude one another"):
        old_launch._validate_launch_command(parse("--cpu", "--tpu"))
    with pytest.raises(FileNotFoundError):
        old_launch._validate_launch_command(parse("--config_file", "no.yaml"))


def test_what_a_program_sets_counts_as_given(tmp_path: Path) -> None:
    args = parse("--config_file", settings_file(tmp_path, distributed_type="MULTI_GPU", num_processes=4,
                                                mixed_precision="bf16", debug=False))  # fmt: skip
    args.num_processes, args.debug, args.mixed_precision = 3, True, None
    old_launch._validate_launch_command(args)
    assert (args.num_processes, args.debug, args.mixed_precision) == (3, True, "bf16")


# ---- for torch's agent --------------------------------------------------------------------------------------------


def told(args: argparse.Namespace) -> dict[str, Any]:
    """What torch's launcher makes of the arguments."""
    return vars(old_utils._filter_args(args, get_args_parser(), ["x.py"]))


def test_the_agent_is_told_through_the_arguments() -> None:
    args = parse("--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "-m")
    old_utils.prepare_multi_gpu_env(args)
    assert args.master_port == str(args.main_process_port) != "0"
    assert (args.nproc_per_node, args.nnodes, args.master_addr) == ("2", "1", "127.0.0.1")
    words = told(args)
    assert (words["master_port"], words["module"], words["training_script"]) == (args.master_port, True, "x.py")
    assert "num_processes" not in words
    together = ["--num_processes", "4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1",
                "--main_process_port", "5000"]  # fmt: skip
    old_utils.prepare_multi_gpu_env(args := parse(*together))
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("2", "2", 1)
    assert args.rdzv_endpoint == "10.0.0.1:5000"
    old_utils.prepare_multi_gpu_env(args := parse(*together, "--same_network"))
    assert (args.master_addr, args.master_port) == ("10.0.0.1", "5000")


def test_arguments_made_by_hand_may_lack_options() -> None:
    args = argparse.Namespace(num_processes=1, num_machines=1, main_process_port=0, fsdp_version=None)
    environment = old_utils.prepare_multi_gpu_env(args)
    assert args.master_port.isdigit()
    assert args.master_port != "0"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"


def test_arguments_that_another_parser_knows() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--a", type=int, default=3)
    parser.add_argument("--b")
    given = argparse.Namespace(a=5, c=4)
    assert vars(old_launch._filter_args(given, parser)) == {"a": 5, "b": None}
    assert vars(old_launch._filter_args(given, parser, ["--b", "7", "--unknown"])) == {"a": 5, "b": "7"}


# ---- mpirun and SageMaker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "words"), [
    ("mpirun (Open MPI) 4.1", ("mpirun", "--hostfile", "-n", "-N", "--bind-to")),
    ("Intel(R) MPI Library", ("mpirun", "-f", "-n", "-ppn", "")),
])  # fmt: skip
def test_mpirun_is_looked_for_by_a_function_that_can_be_replaced(
    version: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert old_utils._get_mpirun_args() == words
    (tmp_path / "hosts").write_text("a\nb\n")
    args = parse("--cpu", "--mpirun_hostfile", str(tmp_path / "hosts"), "--num_processes", "4")
    command, _ = old_utils.prepare_simple_launcher_cmd_env(args)
    assert command[:7] == ["mpirun", words[1], str(tmp_path / "hosts"), words[3], "2", "-n", "4"]
    monkeypatch.setattr("accelerate.utils.launch.which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="needs the program 'mpirun'"):
        old_utils._get_mpirun_args()
    assert Machine().find_program("mpirun")


def test_arguments_of_a_script_become_a_dictionary() -> None:
    words = ["--model_name", "bert", "--do_train", "False", "--epochs", "3", "--lr", "5e-5"]
    assert old_utils._convert_nargs_to_dict(words) == {
        "model_name": "bert", "do_train": False, "epochs": 3, "lr": 5e-5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="--do_train has no value"):
        old_utils._convert_nargs_to_dict(["--do_train", "--epochs", "3"])
