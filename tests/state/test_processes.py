"""`PartialState` in one process."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import long_wait, numa, process_group, processes
from accel_state.devices import DeviceKind, device_kind
from accel_state.enums import DistributedType
from accel_state.processes import PartialState, do_nothing, is_initialized


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has been here."""
    for name in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU",
        "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def _launched(monkeypatch: pytest.MonkeyPatch, rank: int = 0, world_size: int = 1, **more: str) -> None:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), **more}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_process_alone() -> None:
    assert not is_initialized()
    state = PartialState()
    assert is_initialized()
    assert state.initialized
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.distributed_type, state.backend, state.device) == (DistributedType.NO, None, torch.device("cpu"))
    assert (state.debug, state.fork_launched, state.use_distributed) == (False, False, False)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert state.default_device == torch.device("cpu")
    state.wait_for_everyone()
    state.destroy_process_group()
    with state.main_process_first(), state.local_main_process_first():
        pass


def test_all_instances_share_one_state_and_later_arguments_change_nothing() -> None:
    first = PartialState(backend=None, timeout=timedelta(seconds=5), _use_sagemaker=True)
    assert first.backend is None, "arguments of a group are without effect alone"
    second = PartialState(cpu=True)
    assert second.__dict__ is first.__dict__ is PartialState._shared_state
    assert second._cpu is False
    assert repr(second) == (
        "Distributed environment: DistributedType.NO\nNum processes: 1\nProcess index: 0\nLocal process index: 0\n"
        "Device: cpu\n"
    )


def test_a_state_that_was_reset_says_so_and_leaves_the_environment_alone() -> None:
    before = dict(os.environ)
    state = PartialState()
    PartialState._reset_state()
    assert dict(os.environ) == before
    assert not state.initialized
    with pytest.raises(
        AttributeError, match=r"no attribute 'device' now. This happens if `PartialState._reset_state\(\)` was called"
    ):
        _ = state.device
    with pytest.raises(AttributeError, match="'PartialState' object has no attribute 'devise'"):
        _ = state.devise


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("ACCELERATE_DEBUG_MODE", "1", "debug", True),
        ("FORK_LAUNCHED", "1", "fork_launched", True),
        ("ACCELERATE_USE_CPU", "true", "_cpu", True),
        ("ACCELERATE_TORCH_DEVICE", "meta", "device", torch.device("meta")),
    ],
)
def test_the_environment_decides(
    variable: str, text: str, attribute: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(PartialState(), attribute) == value


def test_cores_are_chosen_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(numa, "set_numa_affinity", asked.append)
    PartialState()
    assert asked == []
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "true")
    PartialState()
    assert asked == [0]


# ---- wrong arguments ------------------------------------------------------------------------------------------------


def test_unknown_arguments_are_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"Unknown keyword arguments 'time_out': init_process_group takes .*timeout"):
        PartialState(time_out=3)
    with pytest.raises(TypeError, match="timeout=30 is not a datetime.timedelta"):
        PartialState(timeout=30)
    assert not is_initialized()


def test_a_backend_that_is_not_there_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, 0, 2, MASTER_ADDR="127.0.0.1")
    with pytest.raises(ValueError, match=r"backend='mpi' is not available .* Use one of .*gloo"):
        PartialState(cpu=True, backend="mpi")
    with pytest.raises(ImportError, match="SageMaker needs the library 'smdistributed-dataparallel'"):
        PartialState(cpu=True, backend="smddp")
    assert not is_initialized()
    assert not dist.is_initialized()
    process_group.check_backend("cpu:gloo,cuda:nccl", device_kind("cuda"))
    with pytest.raises(ValueError, match=r"backend='xccl' .* install a build of torch with xccl"):
        process_group.check_backend("xccl", device_kind("xpu"))


def test_an_address_that_nobody_gave_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, 1, 2)
    with pytest.raises(ValueError, match="Rank 1 of 2 .*MASTER_ADDR is not set"):
        PartialState(cpu=True)
    assert not is_initialized()


def test_a_rank_without_a_world_is_refused_unless_the_program_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="RANK='1' is set, and WORLD_SIZE is not: this process would train apart"):
        PartialState(cpu=True)
    assert not is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert PartialState(cpu=True).num_processes == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_says_for_whom_it_waits(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    monkeypatch.setattr(long_wait, "PATIENCE_SECONDS", 0.1)
    _launched(monkeypatch, rank, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(dist.DistError):
        PartialState(cpu=True, timeout=timedelta(seconds=1))
    whom = "the other ranks" if rank == 0 else f"rank 0 at 127.0.0.1:{port}"
    assert f"Rank {rank} of 2: waiting for {whom}, until " in caplog.text
    assert caplog.text.count(", until ") == 1


def test_a_torch_without_distributed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, 0, 2, MASTER_ADDR="127.0.0.1")
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="this torch was built without"):
        PartialState(cpu=True)


# ---- groups of one --------------------------------------------------------------------------------------------------


def test_one_launched_process_gets_a_group_and_one_that_happens_to_have_a_rank_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _launched(monkeypatch)
    assert PartialState().distributed_type == DistributedType.NO
    assert not dist.is_initialized()
    PartialState._reset_state()
    _launched(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    state = PartialState(cpu=True, timeout=timedelta(seconds=60))
    assert (state.distributed_type, state.backend) == (DistributedType.MULTI_CPU, "gloo")
    assert not state.use_distributed
    assert "Backend: gloo" in repr(state)
    state.destroy_process_group()
    assert not dist.is_initialized()


def test_a_group_of_someone_else_is_adopted(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        state = PartialState(timeout=timedelta(seconds=3))
        assert (state.distributed_type, state.backend, state.num_processes) == (DistributedType.MULTI_CPU, "gloo", 1)
    finally:
        dist.destroy_process_group()


def test_deepspeed_is_known_before_its_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    _launched(monkeypatch)
    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.NO
    PartialState._reset_state()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    state = PartialState(cpu=True, init_method=f"file://{tmp_path}/store")
    assert state.distributed_type == DistributedType.DEEPSPEED
    state.destroy_process_group()


def test_a_forked_process_leaves_the_default_group_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(processes.shutdown, "close_process_group", closed.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    state = object.__new__(PartialState)
    state.__dict__ = {"fork_launched": True}
    state.destroy_process_group()
    assert closed == []
    state.destroy_process_group("some group")  # type: ignore[arg-type]
    state.fork_launched = False
    state.destroy_process_group()
    assert closed == ["some group", None]


def test_mps_cannot_communicate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "detect_device_kind", lambda: device_kind("mps"))
    assert PartialState().device == torch.device("mps")
    PartialState._reset_state()
    _launched(monkeypatch, MASTER_ADDR="127.0.0.1")
    with pytest.warns(UserWarning, match="'mps' devices have no backend for collectives"):
        state = PartialState(init_method=f"file://{tmp_path}/store")
    assert (state.device, state.distributed_type) == (torch.device("cpu"), DistributedType.MULTI_CPU)
    state.destroy_process_group()


def test_xla_is_always_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = DeviceKind(
        "meta", DistributedType.XLA, "xla", numbered=False, bf16=True, always_distributed=True
    )  # what a lonely TPU looks like
    monkeypatch.setattr(processes, "detect_device_kind", lambda: kind)
    state = PartialState()
    assert (state.distributed_type, state.num_processes, state.backend) == (DistributedType.XLA, 1, None)


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_threads_are_shared_between_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    process_group.split_cpu_threads(2)
    process_group.split_cpu_threads(16)
    assert chosen == [4, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    process_group.split_cpu_threads(2)
    assert chosen == [4, 1]


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = process_group.ClusterPlace("torchrun", 0, 2, 0, 2)
    mpi = process_group.ClusterPlace("Open MPI", 0, 2, 0, 2)
    cpu, cuda = device_kind("cpu"), device_kind("cuda")
    assert process_group.choose_backend(cpu, torchrun, None) == "gloo"
    assert process_group.choose_backend(cpu, torchrun, "nccl") == "gloo"  # the default of InitProcessGroupKwargs
    assert process_group.choose_backend(cuda, torchrun, None) == "nccl"
    assert process_group.choose_backend(cuda, torchrun, "gloo") == "gloo"
    assert process_group.choose_backend(cpu, mpi, None) == "gloo"
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    assert process_group.choose_backend(cpu, mpi, None) == "mpi"
    assert process_group.choose_backend(cuda, mpi, None) == "nccl"
    monkeypatch.setenv("ACCELERATE_USE_SAGEMAKER", "true")
    assert process_group.choose_backend(cuda, torchrun, None) == "nccl"
    monkeypatch.setenv("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "DATA_PARALLEL")
    assert process_group.choose_backend(cuda, torchrun, None) == "smddp"


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT", None])
@pytest.mark.parametrize("offloads", ["true", "false"])
def test_what_fsdp_offloads_needs_a_backend_for_the_cpu_too(
    monkeypatch: pytest.MonkeyPatch, form: str | None, offloads: str
) -> None:
    place = process_group.ClusterPlace("torchrun", 0, 2, 0, 2)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", offloads)
    if form is not None:
        monkeypatch.setenv("FSDP_STATE_DICT_TYPE", form)
    assert process_group.choose_backend(device_kind("cuda"), place, None) == "nccl", "there is no FSDP"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    both = offloads == "true" or form == "FULL_STATE_DICT"
    assert process_group.choose_backend(device_kind("cuda"), place, None) == ("cpu:gloo,cuda:nccl" if both else "nccl")
    assert process_group.choose_backend(device_kind("cpu"), place, None) == "gloo"


def test_xla_finds_its_group_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(process_group.shutdown, "register", lambda: calls.append("registered"))
    process_group.start_process_group(process_group.ClusterPlace("xla", 1, 4, 1, 4), "xla", {})
    assert calls == [(("xla",), {"init_method": "xla://"}), "registered"]


# ---- decorators -----------------------------------------------------------------------------------------------------


def test_decorators_leave_chosen_functions_as_they_are() -> None:
    state = PartialState()

    def function() -> int:
        """A docstring."""
        return 1

    assert state.on_main_process(function) is function
    assert state.on_main_process()(function) is function
    assert state.on_local_main_process(function) is function
    assert state.on_last_process(function) is function
    assert state.on_process(function, process_index=0) is function
    assert state.on_process(process_index=0)(function) is function
    for skipped in (
        state.on_process(function, process_index=1),
        state.on_local_process(local_process_index=1)(function),
    ):
        assert skipped(1, two=2) is None
        assert (skipped.__name__, skipped.__doc__) == ("function", "A docstring.")  # as on the rank that runs it
    with pytest.raises(ValueError, match="process_index is missing"):
        state.on_process(function)
    with pytest.raises(ValueError, match="local_process_index is missing"):
        state.on_local_process(function)
    assert do_nothing(1, two=2) is None


def test_printing_is_for_the_main_process(capsys: pytest.CaptureFixture[str]) -> None:
    state = PartialState()
    state.print("a", "b", sep="-")
    state.local_process_index = 1
    state.print("c")
    assert capsys.readouterr().out == "a-b\n"
