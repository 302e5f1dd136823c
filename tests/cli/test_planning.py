"""From settings to a command and its environment."""

from __future__ import annotations

import sys

import pytest

from tests.cli.pretended import FREE_PORT, Pretended, plan_of

pytestmark = pytest.mark.usefixtures("in_a_folder_with_a_script")


def test_one_process_is_the_script_itself() -> None:
    plan = plan_of("--cpu", "--num_processes", "1", "--mixed_precision", "bf16", "train.py", "--lr", "1")
    assert plan.runner == "simple"
    assert plan.argv == (sys.executable, "train.py", "--lr", "1")
    assert plan.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert plan.environment["ACCELERATE_USE_CPU"] == "True"


@pytest.mark.parametrize("words", [["--cpu"], [], ["--num_processes", "1"]])
def test_one_process_is_the_guess_without_accelerators(words: list[str]) -> None:
    assert plan_of(*words, "train.py").runner == "simple"


def test_several_cpu_processes_are_really_started() -> None:
    plan = plan_of("--cpu", "--num_processes", "2", "train.py", "--lr", "1", machine=Pretended(cores=8))
    assert plan.runner == "local"
    assert plan.argv == (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", "--nproc_per_node=2", "--master_addr=127.0.0.1", "--master_port=29500"),
        *("train.py", "--lr", "1"),
    )
    assert plan.environment["ACCELERATE_USE_CPU"] == "True"
    assert plan.environment["OMP_NUM_THREADS"] == "4"


def test_every_accelerator_gets_a_process() -> None:
    plan = plan_of("train.py", machine=Pretended(devices=4))
    assert "--nproc_per_node=4" in plan.argv
    assert "ACCELERATE_USE_CPU" not in plan.environment
    assert plan_of("train.py", machine=Pretended(devices=1)).runner == "simple"


def test_only_chosen_accelerators_get_one() -> None:
    plan = plan_of("--gpu_ids", "1, 3", "train.py", machine=Pretended(devices=4))
    assert "--nproc_per_node=2" in plan.argv
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in plan_of("--cpu", "--gpu_ids", "1", "train.py").environment


@pytest.mark.parametrize("way", ["--use_fsdp", "--use_megatron_lm"])
def test_sharded_training_needs_a_group_even_alone(way: str) -> None:
    assert plan_of(way, "--num_processes", "1", "train.py").runner == "torchrun"


def test_several_machines_meet_at_the_first() -> None:
    words = ["--multi_gpu", "--num_machines", "2", "--num_processes", "8", "--machine_rank", "1",
             "--main_process_ip", "10.0.0.1", "--main_process_port", "1234"]  # fmt: skip
    shared = {"--nnodes=2", "--nproc_per_node=4", "--node_rank=1"}
    near = set(plan_of(*words, "--same_network", "train.py").argv)
    assert shared | {"--master_addr=10.0.0.1", "--master_port=1234"} <= near
    far = set(plan_of(*words, "train.py").argv)
    assert shared | {"--rdzv_endpoint=10.0.0.1:1234"} <= far
    elastic = set(plan_of(*words, "--same_network", "--rdzv_backend", "c10d", "train.py").argv)
    assert {"--rdzv_backend=c10d", "--rdzv_endpoint=10.0.0.1:1234"} <= elastic


def test_the_agents_options_are_passed_on() -> None:
    words = ["--max_restarts", "3", "--monitor_interval", "2", "--role", "trainer", "--tee", "3", "--log_dir", "logs",
             "--rdzv_conf", "timeout=60"]  # fmt: skip
    plan = plan_of("--cpu", "--num_processes", "2", *words, "train.py")
    wanted = {"--max_restarts=3", "--monitor_interval=2.0", "--role=trainer", "--tee=3", "--log_dir=logs"}
    assert wanted | {"--rdzv_conf=timeout=60"} <= set(plan.argv)


def test_restarts_need_a_rendezvous_that_works_twice() -> None:
    two = ["--cpu", "--num_processes", "2", "--max_restarts", "1"]
    plan = plan_of(*two, "train.py")
    assert {"--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local_addr=localhost"} <= set(plan.argv)
    assert plan.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "--rdzv_endpoint=127.0.0.1:1234" in plan_of(*two, "--main_process_port", "1234", "train.py").argv
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    assert not own.keys() & plan_of(*two, "train.py", environ=own).environment.keys()


def test_ports() -> None:
    two = ["--cpu", "--num_processes", "2"]
    busy = Pretended(usual_port_is_taken=True)
    assert f"--master_port={FREE_PORT}" in plan_of(*two, "train.py", machine=busy).argv
    assert f"--master_port={FREE_PORT}" in plan_of(*two, "--main_process_port", "0", "train.py").argv
    named = plan_of(*two, "--main_process_port", "1234", "train.py", machine=busy)
    assert "--master_port=1234" in named.argv
    assert not named.port_may_change
    assert plan_of(*two, "train.py").port_may_change


def test_modules_and_programs() -> None:
    assert plan_of("--cpu", "-m", "json.tool", "-h").argv[1:] == ("-m", "json.tool", "-h")
    assert "--module" in plan_of("--cpu", "--num_processes", "2", "-m", "json.tool").argv
    assert plan_of("--cpu", "--no_python", "ls", "-l").argv == ("ls", "-l")
    assert "--no_python" in plan_of("--cpu", "--num_processes", "2", "--no_python", "ls").argv


def test_inside_mpirun_each_copy_runs_the_script() -> None:
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("SIZE", "2"), ("RANK", "1"), ("LOCAL_SIZE", "2"))}
    plan = plan_of("--cpu", "--num_processes", "2", "train.py", environ=environ, machine=Pretended(cores=8))
    assert plan.runner == "simple"
    assert plan.environment["MASTER_ADDR"] == "127.0.0.1"
    assert plan.environment["MASTER_PORT"] == "29500"
    assert plan.environment["OMP_NUM_THREADS"] == "4"


def test_a_default_leaves_the_users_variable_alone() -> None:
    environ = {"FSDP_VERSION": "2", "ACCELERATE_DYNAMO_BACKEND": "EAGER"}
    plan = plan_of("--use_fsdp", "--num_processes", "2", "train.py", environ=environ)
    assert not environ.keys() & plan.environment.keys()
    given = plan_of("--use_fsdp", "--num_processes", "2", "--fsdp_version", "1", "train.py", environ=environ)
    assert given.environment["FSDP_VERSION"] == "1"


def test_accelerators_are_counted_only_when_nothing_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_asks(self: Pretended) -> int:
        raise AssertionError("the number of accelerators was asked for")

    monkeypatch.setattr(Pretended, "num_devices", nobody_asks)
    plan_of("--cpu", "train.py")
    plan_of("--num_processes", "2", "train.py")
