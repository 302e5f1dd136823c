"""Settings: the fields of accelerate 1.x, read from arguments and environment, with errors that say what to do."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.enums import DDPCommunicationHookType, DynamoBackend
from accel_state.errors import MissingLibraryError
from accel_state.mesh import DataPlace, ParallelismConfig, data_place_of
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.compile import TorchDynamoPlugin
from accel_state.settings.data import DataLoaderConfiguration
from accel_state.settings.ddp import DistributedDataParallelKwargs
from accel_state.settings.deepspeed import DeepSpeedPlugin
from accel_state.settings.fp8 import TERecipeKwargs
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.handlers import AutocastKwargs, GradScalerKwargs, Handlers, InitProcessGroupKwargs
from accel_state.settings.parallelism import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from accel_state.settings.profile import ProfileKwargs
from accel_state.settings.project import ProjectConfiguration

FIELDS = json.loads((Path(__file__).parent / "facts" / "fields.json").read_text())


@pytest.mark.parametrize("where", FIELDS)
def test_fields_and_their_order(where: str) -> None:
    module, _, name = where.partition(":")
    found = list(inspect.signature(getattr(import_module(f"accel_state.settings.{module}"), name)).parameters)
    assert found[: len(FIELDS[where])] == FIELDS[where]


def test_settings_load_no_torch() -> None:
    modules = sorted(
        {f"accel_state.settings.{where.partition(':')[0]}" for where in FIELDS} - {"accel_state.settings.fp8"}
    )
    program = f"import sys; [__import__(name) for name in {modules!r}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_only_what_differs_is_passed_on() -> None:
    assert GradScalerKwargs(init_scale=2.0).to_kwargs() == {"init_scale": 2.0}
    assert AutocastKwargs().to_kwargs() == {}
    assert TorchDynamoPlugin(backend="eager", fullgraph=True).to_kwargs() == {"backend": "eager", "fullgraph": True}
    assert "comm_hook" not in DistributedDataParallelKwargs(comm_hook="fp16").to_kwargs()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradientAccumulationPlugin(num_steps=0), ["num_steps", "0"]),
        (lambda: GradientAccumulationPlugin(average_over="tokens"), ["average_over", "tokens", "weights"]),  # type: ignore[arg-type]
        (lambda: TorchDynamoPlugin(backend="inductr"), ["inductr", "inductor"]),  # type: ignore[arg-type]
        (lambda: DistributedDataParallelKwargs(comm_hook="power"), ["power", "power_sgd"]),  # type: ignore[arg-type]
        (lambda: GradScalerKwargs(growth_factor=0.5), ["growth_factor", "0.5"]),
        (lambda: ProjectConfiguration(total_limit=0), ["total_limit", "0"]),
        (lambda: ParallelismConfig(tp_size=0), ["tp_size", "0"]),
        (lambda: TorchContextParallelConfig(cp_comm_strategy="both"), ["cp_comm_strategy", "both", "alltoall"]),
        (lambda: FullyShardedDataParallelPlugin(fsdp_version=3), ["fsdp_version", "3"]),
        (lambda: InitProcessGroupKwargs(timeout="soon"), ["timeout", "soon"]),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_name_key_value_and_remedy(make: Any, words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    text = str(caught.value)
    assert all(word.lower() in text.lower() for word in words), text


def test_the_environment_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")
    plugin = TorchDynamoPlugin()
    assert plugin.backend == DynamoBackend.EAGER
    assert plugin.dynamic is True
    assert TorchDynamoPlugin(backend="inductor").backend == DynamoBackend.INDUCTOR, "an argument wins"
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    monkeypatch.setenv("FSDP_VERSION", "1")
    fsdp = FullyShardedDataParallelPlugin()
    assert fsdp.sharding_strategy.name == "SHARD_GRAD_OP"
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"


def test_handlers_come_one_of_each() -> None:
    scaler, hook = GradScalerKwargs(), DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    handlers = Handlers.sort([scaler, hook])
    assert handlers.grad_scaler is scaler
    assert handlers.ddp is hook
    assert handlers.autocast is None
    assert Handlers.sort(None).ddp is None
    with pytest.raises(ValueError, match="GradScalerKwargs"):
        Handlers.sort([scaler, GradScalerKwargs()])
    with pytest.raises((TypeError, ValueError), match="'x'"):
        Handlers.sort(["x"])  # type: ignore[list-item]


def test_unused_options_of_hooks_are_pointed_out() -> None:
    with pytest.warns(UserWarning, match="comm_state_option"):
        DistributedDataParallelKwargs(comm_state_option={"matrix_approximation_rank": 2})


def test_projects() -> None:
    project = ProjectConfiguration("runs/a")
    assert project.logging_dir == "runs/a"
    project = ProjectConfiguration("runs/a", logging_dir="logs")
    assert (project.project_dir, project.logging_dir) == ("runs/a", "logs")
    project = ProjectConfiguration()
    project.set_directories("runs/b")
    assert (project.project_dir, project.logging_dir) == ("runs/b", "runs/b")


def test_profiles() -> None:
    with ProfileKwargs(activities=["cpu"], record_shapes=True).build() as profiler:
        torch.ones(2).sum()
    assert any("sum" in event.key for event in profiler.key_averages())
    with pytest.raises((ValueError, TypeError), match="gpu"):
        ProfileKwargs(activities=["gpu"]).build()


def test_fp8_recipes() -> None:
    with pytest.raises(MissingLibraryError, match="transformer-engine"):  # cannot be installed without CUDA
        TERecipeKwargs(fp8_format="e4m3")


def test_deepspeed_settings_become_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", gradient_clipping=1.0).deepspeed_config
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["gradient_clipping"] == 1.0
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    assert DeepSpeedPlugin().zero_stage == 1
    with pytest.raises(ValueError, match="4"):
        DeepSpeedPlugin(zero_stage=4)


def test_sequence_lengths() -> None:
    assert DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa").sp_seq_length_is_variable is True
    with pytest.raises(ValueError, match="sp_attn_implementation"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")


def test_loader_settings() -> None:
    assert DataLoaderConfiguration().even_batches is True
    assert DataLoaderConfiguration(split_batches=True).split_batches is True


# ---- meshes, with pretended processes ---------------------------------------------------------------------------


@pytest.fixture
def pretended_group() -> Any:
    """64 processes that exist only in name."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, world: int = 64) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def test_meshes_and_who_reads_what(pretended_group: Any) -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=8, tp_size=4)
    assert config.total_size == 64
    assert config.data_parallel_size == 16
    places = {}
    for rank in (0, 1, 3, 4, 63):
        pretended_group(rank)
        mesh = config.build_device_mesh("cpu")
        assert mesh is not None
        places[rank] = data_place_of(mesh)
    assert places[0] == places[1] == places[3] == DataPlace(0, 16), "one tensor-parallel group reads the same"
    assert places[4] == DataPlace(1, 16)
    assert places[63] == DataPlace(15, 16)


def test_sizes_that_do_not_multiply_up(pretended_group: Any) -> None:
    pretended_group(0)
    with pytest.raises(ValueError, match="64") as caught:
        ParallelismConfig(dp_shard_size=3, tp_size=4).build_device_mesh("cpu")
    assert "12" in str(caught.value)


def test_places_make_sense() -> None:
    with pytest.raises(ValueError, match="2"):
        DataPlace(2, 2)
    assert ParallelismConfig().data_place(0, 1) == DataPlace(0, 1)
