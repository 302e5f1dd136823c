"""The mesh: sizes, axes, and which data each process reads. Large runs are tried with torch's fake process group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from accel_state.mesh import ParallelismConfig
from accel_state.mesh_axes import DataShard, data_shard_of
from accel_state.settings.parallelism import (
    DeepSpeedSequenceParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from tests.support.dtensor_caches import forget_meshes
from tests.support.ranks import ranks


@pytest.fixture
def fake_rank() -> Iterator[Callable[[int, int], None]]:
    """Become one rank of a run that does not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()


def test_all_sizes_are_one_by_default() -> None:
    config = ParallelismConfig()
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (1, 1, 1)
    assert config.active_mesh_dims == config.dp_dim_names == config.non_dp_dim_names == []
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.device_mesh is None
    assert config.build_device_mesh("cpu") is None


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp", "cp", "sp", "pp"])
def test_an_axis_of_several_processes_is_enabled(axis: str) -> None:
    assert not getattr(ParallelismConfig(), f"{axis}_enabled")
    assert getattr(ParallelismConfig(**{f"{axis}_size": 2}), f"{axis}_enabled")


def test_names_of_axes_by_purpose() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=4, cp_size=5)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp", "cp"]
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (120, 6, 20)


def test_handlers_are_made_for_the_axes_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = ParallelismConfig()
    assert config.cp_handler == TorchContextParallelConfig("alltoall")
    assert config.tp_handler is config.sp_handler is None
    assert ParallelismConfig(sp_size=2, cp_size=1).sp_handler is not None
    with pytest.warns(UserWarning, match="tp_handler=.* no effect with tp_size=1"):
        ParallelismConfig(tp_handler=TorchTensorParallelConfig())
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "many")
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_TP_SIZE='many'"):
        ParallelismConfig()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 0}, "ParallelismConfig.tp_size=0 .* at least 1"),
        ({"dp_shard_size": -1}, "dp_shard_size=-1"),
        ({"cp_size": 2.5}, "cp_size=2.5"),
        ({"cp_size": 2, "sp_size": 4}, "cp_size=2 and sp_size=4 both shard the sequence"),
        ({"cp_backend": "ring"}, "cp_backend='ring' .* 'torch'"),
        ({"sp_backend": "ring"}, "sp_backend='ring' .* 'deepspeed'.* 'torch'"),
        ({"tp_size": 2, "tp_handler": TorchContextParallelConfig()}, "a TorchTensorParallelConfig"),
    ],
)
def test_impossible_configurations_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**sizes)


def test_the_product_must_be_the_number_of_processes(fake_rank: Callable[[int, int], None]) -> None:
    config = ParallelismConfig(dp_shard_size=4, tp_size=2)
    message = "dp_shard_size=4 x tp_size=2 = 8 processes, but the run has 64"
    with pytest.raises(ValueError, match=message):
        config.check_world_size(64)
    fake_rank(0, 64)
    with pytest.raises(ValueError, match=message):
        config.build_device_mesh("cpu")
    with pytest.raises(ValueError, match=message):
        config.data_shard(0, 64)
    config.check_world_size(8)
    ParallelismConfig().check_world_size(64)


def test_a_mesh_of_64_processes(fake_rank: Callable[[int, int], None]) -> None:
    fake_rank(13, 64)
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=4, tp_size=4)
    mesh = config.get_device_mesh("cpu")
    assert mesh is not None
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
    assert mesh.shape == (2, 2, 4, 4)
    assert list(mesh.get_coordinate() or ()) == [0, 0, 3, 1]
    assert config.get_device_mesh() is mesh
    assert config.get_device_mesh("cpu") is mesh
    assert config.device_mesh is mesh
    sizes = {name: config.axis_mesh(name) for name in ("dp", "dp_shard_cp", "dp_cp", "tp", "cp", "dp_shard")}
    assert {name: part.size() for name, part in sizes.items() if part is not None} == {
        "dp": 4,
        "dp_shard_cp": 8,
        "dp_cp": 16,
        "tp": 4,
        "cp": 4,
        "dp_shard": 2,
    }
    assert config.axis_mesh("dp").get_local_rank() == 0  # type: ignore[union-attr]
    assert config.axis_mesh("sp") is None
    with pytest.raises(ValueError, match=r"axis='tpp'.*Did you mean 'tp'\?"):
        config.axis_mesh("tpp")


def test_the_device_type_of_a_mesh_is_fixed(fake_rank: Callable[[int, int], None]) -> None:
    fake_rank(0, 4)
    config = ParallelismConfig(tp_size=4)
    assert config.axis_mesh("tp") is None
    with pytest.raises(ValueError, match="pass the device type"):
        config.get_device_mesh()
    config.get_device_mesh("cpu")
    with pytest.raises(ValueError, match="built for 'cpu', not for 'cuda'"):
        config.get_device_mesh("cuda")
    assert config.axis_mesh("dp") is None  # no axis of the data is in use
    fake_rank(0, 8)
    assert ParallelismConfig(dp_shard_size=4, sp_size=2).build_device_mesh("cpu") is None, "DeepSpeed makes the groups"


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"dp_shard_size": 64},
        {"dp_replicate_size": 4, "dp_shard_size": 16},
        {"dp_replicate_size": 2, "dp_shard_size": 8, "tp_size": 4},
        {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 4, "tp_size": 4},
        {"dp_shard_size": 8, "sp_size": 8},
        {"tp_size": 64},
        {"pp_size": 4, "dp_replicate_size": 16},
        {"pp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 4},
    ],
)
def test_every_slice_of_the_data_is_read_by_one_group(sizes: dict[str, int]) -> None:
    config = ParallelismConfig(**sizes)
    places = [config.data_shard(rank, 64) for rank in range(64)]
    count = 64 // config.non_data_parallel_size
    assert {place.count for place in places} == {count}
    assert Counter(place.index for place in places) == dict.fromkeys(range(count), config.non_data_parallel_size)


@pytest.mark.parametrize("rank", [0, 13, 31, 63])
def test_the_mesh_and_the_arithmetic_agree(fake_rank: Callable[[int, int], None], rank: int) -> None:
    fake_rank(rank, 64)
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=4, tp_size=4)
    mesh = config.get_device_mesh("cpu")
    assert mesh is not None
    assert data_shard_of(mesh) == config.data_shard(rank, 64)


@pytest.mark.parametrize("rank", [0, 5, 31, 32, 63])
def test_stages_are_the_slowest_axis(fake_rank: Callable[[int, int], None], rank: int) -> None:
    fake_rank(rank, 64)
    config = ParallelismConfig(pp_size=2, dp_replicate_size=4, dp_shard_size=4, tp_size=2)
    mesh = config.get_device_mesh("cpu")
    assert mesh is not None
    assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "tp")
    assert mesh.get_local_rank("pp") == rank // 32
    assert data_shard_of(mesh) == config.data_shard(rank, 64) == DataShard(rank % 32 // 2, 16)
    assert (config.pp_enabled, config.non_dp_dim_names) == (True, ["tp", "pp"])


def test_a_pipeline_is_described_by_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ParallelismConfig().pp_handler is None
    assert ParallelismConfig(pp_size=2).pp_handler == PipelineParallelConfig()
    for name, text in {
        "SIZE": "4",
        "SCHEDULE": "1f1b",
        "NUM_MICROBATCHES": "8",
        "SPLIT_POINTS": "h.2, h.4,h.6",
    }.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_PP_{name}", text)
    config = ParallelismConfig()
    assert config.total_size == config.pp_size == 4
    assert config.pp_handler == PipelineParallelConfig("1f1b", 8, ["h.2", "h.4", "h.6"], 1)
    weighed = ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(loss_weight=len))
    assert json.loads(json.dumps(weighed.to_json()))["pp_handler"]["loss_weight"] == "len"


def test_a_mesh_of_the_user_says_which_data_to_read(fake_rank: Callable[[int, int], None]) -> None:
    fake_rank(5, 8)
    assert data_shard_of(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))) == DataShard(2, 4)
    assert data_shard_of(init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "fsdp"))) == DataShard(1, 4)
    with pytest.raises(ValueError, match="its dimensions have no names"):
        data_shard_of(init_device_mesh("cpu", (8,)))
    fake_rank(7, 8)
    from torch.distributed.device_mesh import DeviceMesh

    part = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="this rank is not in it"):
        data_shard_of(part)


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_data_place_lies_in_its_range(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="index must lie in"):
        DataShard(index, count)


def test_it_can_be_written_down_and_compared() -> None:
    config = ParallelismConfig(tp_size=2)
    assert json.loads(json.dumps(config.to_json()))["tp_handler"]["enable_async_tp"] is False
    assert config.to_json()["cp_handler"] is None
    assert config == ParallelismConfig(tp_size=2) != ParallelismConfig(tp_size=4)
    assert "tp_size=2" in repr(config)
    assert "total_size=2" in repr(config)


@ranks(2)
def test_a_real_mesh_of_two_processes(rank: int, world: int) -> None:
    config = ParallelismConfig(tp_size=2)
    mesh = config.get_device_mesh("cpu")
    assert mesh is not None
    assert (mesh["tp"].get_local_rank(), data_shard_of(mesh)) == (rank, DataShard(0, 1))
    shards = ParallelismConfig(dp_shard_size=2)
    mesh = shards.get_device_mesh("cpu")
    assert mesh is not None
    assert data_shard_of(mesh) == shards.data_shard(rank, world) == DataShard(rank, 2)


def test_a_program_may_replace_the_function_that_makes_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def of_a_program(device_type: str, mesh_shape: Any, *, mesh_dim_names: Any) -> Any:
        made.append((device_type, mesh_shape, mesh_dim_names))
        return MagicMock()

    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", of_a_program)
    ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2).build_device_mesh("cpu")
    assert made == [("cpu", (2, 2, 2), ("dp_replicate", "dp_shard", "tp"))]


def test_the_backend_that_a_launcher_names_without_being_asked_counts_as_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_BACKEND", "deepspeed")
    for has_deepspeed, chosen in ((False, "torch"), (True, "deepspeed")):
        config = ParallelismConfig(sp_size=2)
        assert config.sp_backend is None
        config.choose_backend(has_deepspeed)
        assert config.sp_backend == chosen
    assert ParallelismConfig(sp_size=2, sp_backend="deepspeed").sp_backend == "deepspeed"
    assert ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig()).sp_backend == "deepspeed"
    assert ParallelismConfig().sp_backend == "deepspeed"
