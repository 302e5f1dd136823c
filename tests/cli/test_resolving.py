"""Flag, then config file, then environment, then a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.pretended import Pretended, settings_of, value_in


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(**values: Any) -> str:
        path = tmp_path / "settings.json"
        path.write_text(json.dumps({"distributed_type": "NO"} | values))
        return str(path)

    return write_file


def test_each_source_gives_way_to_the_one_before(write: Any) -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    assert settings_of("x.py").mixed_precision == "no"
    assert settings_of("x.py", environ=environ).mixed_precision == "fp16"
    file = write(mixed_precision="bf16")
    from_file = settings_of("--config_file", file, "x.py", environ=environ)
    assert from_file.mixed_precision == "bf16"
    assert from_file.sources["mixed_precision"] == "file"
    flag = settings_of("--config_file", file, "--mixed_precision", "no", "x.py", environ=environ)
    assert flag.mixed_precision == "no"
    assert flag.sources["mixed_precision"] == "flag"
    silent = write()
    assert settings_of("--config_file", silent, "x.py", environ=environ).mixed_precision == "fp16"


def test_the_default_file_counts_unless_the_cpu_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: NO\nmixed_precision: bf16\n")
    environ = {"HF_HOME": str(tmp_path)}
    assert settings_of("x.py", environ=environ).mixed_precision == "bf16"
    assert settings_of("--cpu", "x.py", environ=environ).mixed_precision == "no"


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("MULTI_GPU", "multi_gpu"),
        ("MULTI_NPU", "multi_gpu"),
        ("FSDP", "use_fsdp"),
        ("DEEPSPEED", "use_deepspeed"),
        ("MEGATRON_LM", "use_megatron_lm"),
        ("XLA", "tpu"),
    ],
)
def test_the_file_chooses_the_way_of_training(write: Any, kind: str, flag: str) -> None:
    file = write(distributed_type=kind, num_processes=2)
    assert getattr(settings_of("--config_file", file, "x.py"), flag) is True


def test_a_flag_for_hardware_or_training_replaces_the_files(write: Any) -> None:
    file = write(distributed_type="FSDP", num_processes=4, use_cpu=True)
    gpu = settings_of("--config_file", file, "--multi_gpu", "x.py")
    assert (gpu.multi_gpu, gpu.use_fsdp, gpu.use_cpu) == (True, False, False)
    cpu = settings_of("--config_file", write(distributed_type="MULTI_GPU", num_processes=4), "--cpu", "x.py")
    assert (cpu.use_cpu, cpu.multi_gpu, cpu.num_processes) == (True, False, 4)
    sharded = settings_of("--config_file", write(distributed_type="MULTI_GPU", num_processes=4), "--use_fsdp", "x.py")
    assert (sharded.use_fsdp, sharded.multi_gpu) == (True, False)


def test_cpu_files(write: Any) -> None:
    several = settings_of("--config_file", write(distributed_type="MULTI_CPU", num_processes=2), "x.py")
    assert (several.use_cpu, several.num_processes, several.runner) == (True, 2, "local")
    one = settings_of("--config_file", write(distributed_type="NO", num_processes=4, use_cpu=True), "x.py")
    assert (one.use_cpu, one.num_processes, one.runner) == (True, 1, "simple")


@pytest.mark.parametrize(
    ("section", "key", "value", "name", "result"),
    [
        ("fsdp_config", "fsdp_version", 2, "fsdp_version", "2"),
        ("fsdp_config", "offload_params", True, "fsdp_offload_params", "True"),
        ("fsdp_config", "fsdp_backward_prefetch_policy", "BACKWARD_PRE", "fsdp_backward_prefetch", "BACKWARD_PRE"),
        ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap", ["A", "B"], "fsdp_transformer_layer_cls_to_wrap", "A,B"),
        ("fp8_config", "amax_history_length", 7, "fp8_amax_history_len", 7),
        ("fp8_config", "amax_compute_algorithm", "max", "fp8_amax_compute_algo", "max"),
        ("fp8_config", "backend", "TE", "fp8_backend", "TE"),
        ("fp8_config", "override_linear_precision", [True, False, True], "fp8_override_linear_precision", (1, 0, 1)),
        ("dynamo_config", "dynamo_backend", False, "dynamo_backend", "no"),
        ("dynamo_config", "use_fullgraph", "yes", "dynamo_use_fullgraph", True),
        ("megatron_lm_config", "megatron_lm_no_load_optim", "false", "megatron_lm_no_load_optim", False),
        ("mpirun_config", "mpirun_hostfile", "/h", "mpirun_hostfile", "/h"),
    ],
)
def test_sections_set_options(write: Any, section: str, key: str, value: Any, name: str, result: Any) -> None:
    settings = settings_of("--config_file", write(**{section: {key: value}}), "x.py")
    assert value_in(settings, name) == result
    assert type(value_in(settings, name)) is type(result)
    assert settings.notes == ()


def test_numbers_may_be_texts(write: Any) -> None:
    settings = settings_of(
        "--config_file", write(distributed_type="MULTI_GPU", num_processes="2", main_process_port="1234"), "x.py"
    )
    assert (settings.num_processes, settings.main_process_port) == (2, 1234)


def test_unknown_keys_of_a_section_are_mentioned(write: Any) -> None:
    settings = settings_of("--config_file", write(fsdp_config={"auto_wrap_polciy": "NO_WRAP"}), "x.py")
    (note,) = settings.notes
    assert "fsdp_config.auto_wrap_polciy" in note
    assert "'fsdp_auto_wrap_policy'" in note


def test_environment() -> None:
    assert settings_of("x.py", environ={"ACCELERATE_USE_CPU": "yes"}).use_cpu is True
    assert settings_of("--multi_gpu", "x.py", environ={"ACCELERATE_USE_CPU": "yes"}).use_cpu is False
    with pytest.raises(ValueError, match="variable ACCELERATE_MIXED_PRECISION: 'half' is not one of"):
        settings_of("x.py", environ={"ACCELERATE_MIXED_PRECISION": "half"})
    with pytest.raises(ValueError, match="variable ACCELERATE_USE_CPU: 'perhaps' is not true or false"):
        settings_of("x.py", environ={"ACCELERATE_USE_CPU": "perhaps"})


def test_threads() -> None:
    machine = Pretended(cores=8)
    assert settings_of("--cpu", "x.py", machine=machine).num_cpu_threads_per_process == 8
    assert settings_of("--cpu", "--num_processes", "3", "x.py", machine=machine).num_cpu_threads_per_process == 2
    assert settings_of("--cpu", "--num_processes", "99", "x.py", machine=machine).num_cpu_threads_per_process == 1
    assert settings_of("x.py", machine=machine).num_cpu_threads_per_process == 1
    chosen = settings_of("--cpu", "x.py", machine=machine, environ={"OMP_NUM_THREADS": "4,2"})
    assert chosen.num_cpu_threads_per_process is None  # the variable reaches the script as it is


def test_restarts_on_several_machines() -> None:
    words = ["--num_machines", "2", "--num_processes", "2", "--max_restarts", "1"]
    assert "--rdzv_backend c10d" in settings_of(*words, "x.py").notes[0]
    assert settings_of(*words, "--rdzv_backend", "c10d", "x.py").notes == ()


def test_a_guess_of_several_processes_is_said() -> None:
    (note,) = settings_of("x.py", machine=Pretended(devices=2)).notes
    assert "2 processes" in note
    assert settings_of("--num_processes", "2", "x.py", machine=Pretended(devices=2)).notes == ()
    assert settings_of("--num_machines", "2", "x.py", machine=Pretended(devices=4)).num_processes == 8
