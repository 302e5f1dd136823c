"""`PartialState` in real groups."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_state.enums import DistributedType
from accel_state.processes import PartialState
from tests.support.ports import free_ports
from tests.support.ranks import ranks

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}  # fmt: skip


@ranks(2, 3)
def test_places(rank: int, world: int) -> None:
    state = PartialState()
    assert (state.process_index, state.local_process_index, state.num_processes) == (rank, rank, world)
    assert (state.distributed_type, state.backend) == (DistributedType.MULTI_CPU, "gloo")
    assert state.device == torch.device("cpu")
    assert state.use_distributed
    assert state.is_main_process == state.is_local_main_process == (rank == 0)
    assert state.is_last_process == (rank == world - 1)
    assert state.debug is False


@ranks(2)
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_each_launcher_is_understood(rank: int, world: int, launcher: str) -> None:
    """The group of the test gives way to one that the state starts from the launcher's variables."""
    port = free_ports(1) if rank == 0 else [None]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    for name in LAUNCHERS["torchrun"]:
        del os.environ[name]
    os.environ.update(zip(LAUNCHERS[launcher], map(str, (rank, world, rank, world)), strict=True))
    os.environ["MASTER_PORT"] = str(port[0])
    if launcher == "SLURM":
        del os.environ["MASTER_ADDR"]
        os.environ.update(SLURM_STEP_NODELIST="127.0.0.1", SLURM_JOB_ID="1")
    state = PartialState(cpu=True, timeout=timedelta(seconds=60))
    assert (state.process_index, state.local_process_index, state.num_processes) == (rank, rank, world)
    assert state.backend == dist.get_backend() == "gloo"
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert total.item() == 3
    assert [os.environ[name] for name in LAUNCHERS["torchrun"]] == [str(rank), str(world)] * 2  # for other libraries


@ranks(2)
def test_a_group_of_its_own_can_be_ended_alone_and_waiting_after_the_end_warns_and_goes_on(rank: int) -> None:
    """As scripts do that end their trackers, and only then save their model."""
    state = PartialState()
    group = dist.new_group([0, 1])
    dist.barrier(group)
    state.destroy_process_group(group)
    assert dist.is_initialized()
    state.wait_for_everyone()
    state.destroy_process_group()
    with pytest.warns(UserWarning, match=rf"on rank {rank} did not wait.*before end_training"):
        state.wait_for_everyone()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool ends one


@ranks(2)
def test_the_main_process_goes_first_and_nobody_is_left_waiting_when_it_fails(rank: int, tmp_path: Path) -> None:
    state = PartialState()
    for name in ("main_process_first", "local_main_process_first"):
        marker = tmp_path / name
        with getattr(state, name)():
            assert marker.exists() == (rank == 1)
            marker.touch()
    reached = False
    try:
        with state.main_process_first():
            if rank == 0:
                raise KeyError
            reached = True
    except KeyError:
        assert rank == 0
    assert reached == (rank == 1)


@ranks(3)
def test_decorated_functions_run_where_they_should(rank: int, world: int) -> None:
    state = PartialState()

    def function() -> int:
        return rank

    assert state.on_main_process(function)() == (0 if rank == 0 else None)
    assert state.on_local_main_process(function)() == (0 if rank == 0 else None)
    assert state.on_last_process(function)() == (2 if rank == 2 else None)
    assert state.on_process(process_index=1)(function)() == (1 if rank == 1 else None)
    assert state.on_local_process(function, local_process_index=1)() == (1 if rank == 1 else None)


@ranks(2, 3)
def test_parts_of_the_inputs(rank: int, world: int) -> None:
    state = PartialState()
    inputs = list(range(10))
    with state.split_between_processes(inputs) as part:
        parts: list[list[int] | None] = [None] * world
        dist.all_gather_object(parts, part)
        assert sum(parts, []) == inputs  # type: ignore[arg-type]
    with state.split_between_processes({"x": torch.arange(7)}, apply_padding=True) as padded:
        sizes = [None] * world
        dist.all_gather_object(sizes, len(padded["x"]))
        assert len(set(sizes)) == 1
    with pytest.raises(TypeError, match="cannot be split"), state.split_between_processes(None):
        pass


@ranks(2)
def test_a_group_that_disagrees_with_the_variables_is_believed(rank: int, world: int) -> None:
    os.environ.update(RANK="7", WORLD_SIZE="9", LOCAL_RANK="1")
    state = PartialState()
    assert (state.process_index, state.num_processes, state.local_process_index) == (rank, world, 1)
