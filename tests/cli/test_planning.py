"""From flags, settings file, environment and machine to a command and its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_cli.launch.command import launch_command_parser
from accel_cli.launch.machine import Machine, free_port, is_free
from accel_cli.launch.plan import Plan, make_plan
from accel_cli.launch.resolve import resolve
from accel_cli.launch.validate import check_flags, check_settings


class Pretended(Machine):
    """A machine of our choice."""

    def __init__(self, devices: int = 0, cores: int = 8) -> None:
        self.devices, self.cores = devices, cores

    def num_devices(self) -> int:
        return self.devices

    def visible_devices_variable(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def num_cores(self) -> int:
        return self.cores

    def port(self, wanted: int | None, usual: int = 29500) -> int:
        return wanted or usual


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text("")
    return tmp_path / "train.py"


def plan(*words: str, machine: Machine | None = None, environ: dict[str, str] | None = None, **home: Any) -> Plan:
    import os

    args = launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])
    check_flags(args)
    environ = {"HF_HOME": os.environ["HF_HOME"], **(environ or {})}
    settings = resolve(args, environ, machine or Pretended())
    check_settings(settings)
    return make_plan(settings, environ)


@pytest.mark.usefixtures("script")
class TestPlan:
    def test_one_process_is_the_script_itself(self) -> None:
        found = plan("--cpu", "--num_processes", "1", "--mixed_precision", "bf16")
        assert found.runner == "simple"
        assert found.argv[1:] == ("train.py", "--lr", "1")
        assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert found.environment["ACCELERATE_USE_CPU"] == "True"

    def test_several_cpu_processes_are_really_started(self) -> None:
        found = plan("--cpu", "--num_processes", "2")
        assert found.runner == "torchrun"
        assert "--nproc_per_node=2" in found.argv
        assert found.argv[1:3] == ("-m", "torch.distributed.run")
        assert found.environment["ACCELERATE_USE_CPU"] == "True"
        assert int(found.environment["OMP_NUM_THREADS"]) == 4

    def test_all_devices_are_used(self) -> None:
        found = plan(machine=Pretended(devices=4))
        assert "--nproc_per_node=4" in found.argv

    def test_chosen_devices(self) -> None:
        found = plan("--num_processes", "2", "--gpu_ids", "1,3", machine=Pretended(devices=4))
        assert found.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
        assert "--nproc_per_node=2" in found.argv

    def test_several_machines(self) -> None:
        words = ("--multi_gpu", "--num_machines", "2", "--num_processes", "8", "--machine_rank", "1")
        found = plan(*words, "--main_process_ip", "10.0.0.1", "--main_process_port", "1234", "--same_network",
                     machine=Pretended(devices=4))  # fmt: skip
        assert {
            "--nnodes=2",
            "--nproc_per_node=4",
            "--node_rank=1",
            "--master_addr=10.0.0.1",
            "--master_port=1234",
        } <= set(found.argv)

    def test_flag_wins_over_file_and_file_over_environment(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: fp16\nnum_processes: 1\n"
            "use_cpu: true\n"
        )
        assert plan("--config_file", "a.yaml").environment["ACCELERATE_MIXED_PRECISION"] == "fp16"
        both = plan("--config_file", "a.yaml", "--mixed_precision", "bf16")
        assert both.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"

    def test_modules_and_programs(self) -> None:
        assert "-m" in plan("--cpu", "-m").argv
        with pytest.raises(ValueError, match="./train.py"):
            plan("--cpu", "--no_python")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--cpu", "--multi_gpu"], "exclude one another"),
            (["--num_processes", "0"], "at least 1"),
            (["--num_processes", "-2"], "at least 1"),
            (["--tpu"], "TPU"),
            (["--config_file", "missing.yaml"], "missing.yaml"),
        ],
    )
    def test_what_cannot_be_done_is_said(self, words: list[str], message: str) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            plan(*words)

    def test_misspelt_keys(self, tmp_path: Path) -> None:
        (tmp_path / "bad.yaml").write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precison: fp16\n"
        )
        with pytest.raises(ValueError, match="mixed_precision"):
            plan("--config_file", "bad.yaml")

    def test_settings_are_data(self, tmp_path: Path) -> None:
        (tmp_path / "evil.yaml").write_text("distributed_type: !!python/object/apply:os.system ['touch hurt']\n")
        with pytest.raises(ValueError, match="evil.yaml"):
            plan("--config_file", "evil.yaml")
        assert not (tmp_path / "hurt").exists()


def test_ports() -> None:
    import socket

    port = free_port()
    assert is_free(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not is_free(port)
        assert Machine().port(None, usual=port) != port
    assert Machine().num_cores() >= 1
