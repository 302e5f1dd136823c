"""What cannot be done is said in one line, before anything starts."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_state.libraries
from accel_cli.configfile.write import write_basic_config
from accel_cli.launch.machine import Machine
from accel_cli.main import main
from accel_state import devices, nvidia
from accel_state.nvidia import MissingGpus
from tests.cli.pretended import Pretended, plan_of, settled
from tests.cli.running import refusal


@pytest.fixture(autouse=True)
def without_fp8(in_a_folder_with_a_script: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel_state.libraries, "is_fp8_available", lambda: False)


WITHOUT = Pretended(has_devices=False)
IN_PARTS = (
    "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: conf/zero.json\n"
)
IN_FP8 = "distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  margin: 0\n  interval: 1\n"


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--gpu_ids", "0,1"], "--gpu_ids 0,1"),
        (["--gpu_ids", "0", "--num_processes", "1"], "--gpu_ids 0"),
        (["--multi_gpu", "--num_processes", "2"], "--multi_gpu"),
        (["--multi_gpu", "--gpu_ids", "0,1"], "--multi_gpu and --gpu_ids 0,1"),
    ],
)
def test_accelerators_that_were_asked_for_must_be_there(words: list[str], flags: str) -> None:
    message = rf"^{flags} needs a GPU or other accelerator, and this machine has none. Leave it out, or give --cpu"
    with pytest.raises(ValueError, match=message):
        plan_of(*words, "train.py", machine=WITHOUT)
    settings, _ = settled("--dry_run", *words, "train.py", machine=WITHOUT)
    assert any("a launch on this machine would fail" in note and flags in note for note in settings.notes)
    plan_of(*words, "train.py", machine=WITHOUT, environ={"ACCELERATE_TORCH_DEVICE": "cpu"})
    settings, _ = settled(*words, "train.py")
    assert not any("machine" in note for note in settings.notes), settings.notes


@pytest.mark.parametrize(
    ("gpus", "ids", "fault"),
    [
        (1, "1", "names GPU '1', but this machine has only GPU 0."),
        (1, "0,1", "names GPU '1', but this machine has only GPU 0."),
        (8, "8", "names GPU '8', but this machine has only GPUs 0 to 7."),
        (8, "0,0", "names GPU '0' twice."),
        (8, "-1", "names GPU '-1', but"),
    ],
)
def test_gpus_that_were_named_must_be_there(gpus: int, ids: str, fault: str) -> None:
    machine = Pretended(gpus=gpus)
    with pytest.raises(
        ValueError, match=rf"^--gpu_ids {ids} {fault}.* Name GPUs of this machine, each once, or give --cpu"
    ):
        plan_of(f"--gpu_ids={ids}", "train.py", machine=machine)
    settings, _ = settled("--dry_run", f"--gpu_ids={ids}", "train.py", machine=machine)
    assert any("a launch on this machine would fail" in note and fault in note for note in settings.notes)
    Path("a.yaml").write_text(f"distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: '{ids}'\n")
    with pytest.raises(ValueError, match=rf"^a.yaml: gpu_ids: {ids} {fault}"):
        plan_of("--config_file", "a.yaml", "train.py", machine=machine)


@pytest.mark.parametrize(("gpus", "ids"), [(0, "5"), (1, "0"), (8, "7,0"), (8, "GPU-aa"), (8, "MIG-bb"), (1, "all")])
def test_gpus_that_are_there_or_unknown_are_accepted(gpus: int, ids: str) -> None:
    plan_of(f"--gpu_ids={ids}", "train.py", machine=Pretended(gpus=gpus))


HIDDEN = MissingGpus("GPUs 0 to 7", "CUDA_VISIBLE_DEVICES is '', which hides all GPUs", "Unset it", on_purpose=True)
WITHOUT_CUDA = MissingGpus("GPU 0", "torch 2.13.0+cpu is built without CUDA", "Install a torch for CUDA")


@pytest.mark.parametrize(
    ("missing", "words", "message"),
    [
        (
            HIDDEN, ["--multi_gpu", "--num_processes", "2"],
            "--multi_gpu asks for GPUs, and this machine has GPUs 0 to 7, but CUDA_VISIBLE_DEVICES is '', which hides all "
            "GPUs. Unset it; to run on the CPU, give --cpu.",
        ),
        (
            WITHOUT_CUDA, ["--gpu_ids", "0"],
            "--gpu_ids 0 asks for GPUs, and this machine has GPU 0, but torch 2.13.0+cpu is built without CUDA. Install a "
            "torch for CUDA; to run on the CPU, give --cpu.",
        ),
        (WITHOUT_CUDA, ["--config_file", "a.yaml"], "a.yaml asks for GPUs, and this machine has GPU 0, but torch"),
        (WITHOUT_CUDA, ["--config_file", "a.yaml", "--num_processes", "4"], "a.yaml asks for GPUs, and this machine has"),
    ],
)  # fmt: skip
def test_gpus_that_torch_does_not_see_are_told_of(missing: MissingGpus, words: list[str], message: str) -> None:
    Path("a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    machine = Pretended(has_devices=False, missing=missing)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        plan_of(*words, "train.py", machine=machine)
    plan_of("--cpu", "train.py", machine=machine)
    plan_of("train.py", machine=machine)  # the process itself warns


@pytest.mark.parametrize(
    ("missing", "why"),
    [(None, "this machine has none"), (HIDDEN, "CUDA_VISIBLE_DEVICES is '', which hides all GPUs")],
)
def test_a_file_that_asks_for_gpus_where_there_are_none_is_told_of(missing: MissingGpus | None, why: str) -> None:
    Path("a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0,1\n")
    settings, _ = settled("--config_file", "a.yaml", "train.py", machine=Pretended(has_devices=False, missing=missing))
    assert settings.notes == (
        f"a.yaml asks for GPUs, but {why}. The processes run on the CPU. Give --cpu to do so without this note.",
    )


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a driver with one GPU, which a torch without CUDA does not see."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(devices, "detect_device_kind", lambda: devices.device_kind("cpu"))
    monkeypatch.setattr(nvidia, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setattr(nvidia, "DRIVER_FILES", tmp_path / "driver")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("one_gpu")
def test_the_real_machine_is_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(capsys, "launch", "--gpu_ids", "1", "train.py")
    assert "--gpu_ids 1 names GPU '1', but this machine has only GPU 0." in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    said = refusal(capsys, "launch", "--gpu_ids", "0", "train.py")  # which replaces the variable
    assert re.search(r"has GPU 0, but torch \S+ is built without CUDA", said)
    said = refusal(capsys, "launch", "--multi_gpu", "--num_processes", "2", "train.py")
    assert "but CUDA_VISIBLE_DEVICES is '-1', which hides all GPUs. Unset" in said


@pytest.mark.usefixtures("one_gpu")
def test_other_commands_say_why_there_is_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert re.search(r"accelerator: none: this machine has GPU 0, but torch \S+ is built", capsys.readouterr().out)
    write_basic_config(save_location=str(tmp_path / "new.yaml"))
    assert (
        "new.yaml says use_cpu: true, because torch sees no GPU here: this machine has GPU 0"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("text", "missing"), [(IN_PARTS, "'conf/zero.json' does not exist"), (IN_FP8, "'fp8' needs")])
def test_a_dry_run_of_a_file_of_another_machine(
    text: str, missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_cli.launch.machine.Machine.num_devices", lambda self: 0)
    Path("a.yaml").write_text(text)
    assert missing in refusal(capsys, "launch", "--config_file", "a.yaml", "train.py")
    assert main(["launch", "--dry_run", "--config_file", "a.yaml", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert "The same by hand:" in out
    assert "a launch on this machine would fail: " in err
    assert missing in err


def test_a_missing_script_is_told_before_anything_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(self: Machine) -> int:
        raise AssertionError("the accelerators were counted, which takes seconds")

    monkeypatch.setattr(Machine, "num_devices", count)
    said = refusal(capsys, "launch", "tarin.py")
    assert "The script 'tarin.py' does not exist. Did you mean 'train.py'?" in said


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
        ([*TWO_MACHINES[:3], "3", *FIRST], "got 3 processes and 2 machines"),
        (TWO_MACHINES, "Give --main_process_ip"),
        ([*TWO_MACHINES, "--main_process_ip", "a"], "Give --main_process_port"),
        ([*TWO_MACHINES, *FIRST, "--machine_rank", "2"], "machine_rank must be between 0 and 1 for 2 machines, got 2"),
        (["--main_process_port", "70000"], "between 0 and 65535, got 70000"),
        (["--max_restarts", "-1"], "must not be negative, got -1"),
        (["--monitor_interval", "0"], "above 0 seconds"),
        (["--shutdown_timeout", "-1"], "must not be below 0 seconds"),
        (["--tee", "9"], "tee must be .* got '9'"),
        (["--rdzv_conf", "timeout"], "rdzv_conf must be pairs"),
        (["--mixed_precision", "fp8"], "needs torchao"),
        (["--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"], "needs --use_fsdp"),
        (["--gpu_ids", "0,1", "--num_processes", "4"], "--gpu_ids 0,1 names 2 devices, too few for the 4 processes"),
        (["--mpirun_hostfile", "h", "--multi_gpu"], "--mpirun_hostfile and --multi_gpu contradict one another"),
        (
            ["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER"],
            "--fsdp_auto_wrap_policy: 'TRANSFORMER' is not one",
        ),
        (["--use_fsdp", "--fsdp_offload_params", "maybe"], "--fsdp_offload_params: 'maybe' is not one of true, false"),
    ],
)
def test_settings(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(*words, "train.py", machine=Pretended())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distributed_type": "MULTI_GPU"}, "leaves it to the command line. Give --num_processes"),
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
        (["-m", "no_such_module.part"], "The module 'no_such_module.part' was not found"),
        (["--no_python", "train.py"], "Write './train.py'"),
        (["--no_python", "no_such_program"], "The program 'no_such_program' was not found"),
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


def test_an_engine_that_no_package_registers_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        "--engine DPP: no installed package registers an engine of this name; none is installed.*Install the package"
    )
    with pytest.raises(ValueError, match=message):
        plan_of("--cpu", "--engine", "DPP", "train.py")
    entries = (EntryPoint("COUNTING", "outside:Engine", "accelerate.engines"),)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    with pytest.raises(ValueError, match=r"there are COUNTING\. Did you mean 'COUNTING'\?"):
        plan_of("--cpu", "--engine", "COUNTNG", "train.py")
    for name in ("COUNTING", "FSDP2", "MULTI_CPU"):
        plan_of("--cpu", "--engine", name, "train.py")
