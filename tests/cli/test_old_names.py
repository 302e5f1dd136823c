"""Functions that programs which build launches themselves call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.launch.command import launch_command_parser
from accelerate.commands import launch as old_launch
from accelerate.commands.config import config_args, default_config_file
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils import launch as old_utils


def parse(*words: str) -> object:
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


def test_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        old_launch.simple_launcher(parse("--cpu"))
    seen = []
    monkeypatch.setattr("accel_cli.launch.command.run_plan", lambda plan: seen.append(plan) or 0)
    old_launch.multi_gpu_launcher(parse("--num_processes", "1"))
    assert seen[0].runner == "torchrun"
    assert "--nproc_per_node=1" in seen[0].argv


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
