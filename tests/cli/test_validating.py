"""What cannot be done is said in one line, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import accel_state.libraries
from tests.cli.pretended import Pretended, plan_of


@pytest.fixture(autouse=True)
def in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accel_state.libraries, "is_fp8_available", lambda: False)
    (tmp_path / "train.py").write_text("")


TWO_MACHINES = ["--num_machines", "2", "--num_processes", "2"]
FIRST = ["--main_process_ip", "a", "--main_process_port", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu", "--multi_gpu"], "--cpu and --multi_gpu exclude one another"),
        (["--use_fsdp", "--use_deepspeed"], "exclude one another"),
        (["-m", "--no_python"], "exclude one another"),
        (["--multi_gpu", "--num_processes", "1"], "at least 2 processes"),
        (["--num_processes", "0"], "--num_processes must be at least 1, got 0"),
        (["--num_processes", "-2"], "at least 1, got -2"),
        (["--num_machines", "0"], "--num_machines must be at least 1"),
        (["--num_cpu_threads_per_process", "0"], "must be at least 1, got 0"),
        (["--cpu", "--mpirun_hostfile", "h"], "The hostfile 'h' does not exist"),
        (["--tpu", "--use_fsdp"], "--tpu and --use_fsdp exclude one another"),
        (["--multi_gpu", "--use_deepspeed"], "--multi_gpu and --use_deepspeed exclude one another"),
        (["--use_fsdp", "--use_megatron_lm"], "--use_fsdp and --use_megatron_lm exclude one another"),
        (["--config_file", "missing.yaml"], "'missing.yaml' does not exist"),
        ([*TWO_MACHINES[:3], "3", *FIRST], "3 cannot be shared equally by 2 machines"),
        (TWO_MACHINES, "give --main_process_ip"),
        ([*TWO_MACHINES, "--main_process_ip", "a"], "give --main_process_port"),
        ([*TWO_MACHINES, *FIRST, "--machine_rank", "2"], "machine_rank must be between 0 and 1 for 2 machines, got 2"),
        (["--main_process_port", "70000"], "between 0 and 65535, got 70000"),
        (["--max_restarts", "-1"], "must not be negative, got -1"),
        (["--monitor_interval", "0"], "above 0 seconds"),
        (["--tee", "9"], "tee must be .* got '9'"),
        (["--rdzv_conf", "timeout"], "rdzv_conf must be pairs"),
        (["--mixed_precision", "fp8"], "needs torchao"),
        (["--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"], "needs --use_fsdp"),
        (["--use_parallelism_config", "--parallelism_config_sp_size", "2"], "needs --use_deepspeed, or .* torch"),
    ],
)
def test_settings(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(*words, "train.py", machine=Pretended())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distributed_type": "MULTI_GPU"}, "leaves the number of processes open: give --num_processes"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 0}, "num_processes must be at least 1, got 0"),
        ({"distributed_type": "NO", "num_machines": 0}, "num_machines must be at least 1, got 0"),
    ],
)
def test_settings_from_a_file(values: dict[str, Any], message: str) -> None:
    Path("a.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        plan_of("--config_file", "a.json", "train.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian.py"], r"'trian.py' does not exist. Did you mean 'train.py'\?"),
        (["nowhere/a.py"], "'nowhere/a.py' does not exist"),
        (["pytest"], "Write `-m pytest` for a module, or `--no_python pytest`"),
        (["-m", "no_such_module.part"], "no module 'no_such_module.part'"),
        (["--no_python", "train.py"], "Write './train.py'"),
        (["--no_python", "no_such_program"], "no program 'no_such_program'"),
    ],
)
def test_scripts(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of("--cpu", *words)


def test_modules_of_this_folder_are_found() -> None:
    Path("mine").mkdir()
    Path("mine", "tool.py").write_text("")
    assert plan_of("--cpu", "-m", "mine.tool").argv[1:] == ("-m", "mine.tool")


@pytest.mark.parametrize("tee", ["0", "3", "0:1", "0:1,1:2"])
def test_what_tee_may_be(tee: str) -> None:
    plan_of("--cpu", "--tee", tee, "train.py")
