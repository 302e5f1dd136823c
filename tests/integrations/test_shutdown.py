"""Processes whose work is done end well, and those that fail end soon."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import shutdown
from accel_state.processes import PartialState
from tests.support.ports import free_ports
from tests.support.ranks import ranks
from tools.exit_check import run_once


@pytest.mark.takes_turns
@pytest.mark.launch
def test_processes_that_trained_end_well() -> None:
    assert run_once("prepared") == (0, 0)


@pytest.mark.takes_turns
@pytest.mark.launch
def test_a_process_that_fails_ends_in_spite_of_a_collective_under_way() -> None:
    assert run_once("stuck")[1] == 1


# ---- draining ---------------------------------------------------------------------------------------------------


@ranks(1, 2)
def test_threads_have_let_go_of_callbacks_and_tensors(rank: int) -> None:
    released: list[int] = []

    class Callback:
        def __call__(self, _: Any) -> None:
            torch.ones(100).sum()

        def __del__(self) -> None:
            released.append(1)

    group = dist.new_group()
    for _ in range(20):
        dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().add_done_callback(Callback())
    for _ in range(2):
        assert shutdown.drain(group)
    assert len(released) == 20
    shutdown.close_process_group(group)
    assert group not in dist.distributed_c10d._world.pg_map
    for other in (group, object()):
        assert shutdown.drain(other), "draining what has ended, or needs none, does no harm"


@ranks(2)
def test_closing_does_not_wait_for_threads_in_a_collective(rank: int) -> None:
    group = dist.new_group()
    values = [torch.ones(1), torch.ones(1)]  # one for each thread
    if rank == 0:
        works = [dist.all_reduce(value, group=group, async_op=True) for value in values]
        assert not shutdown.drain(group, seconds=0.1)
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 1:  # only now it takes part
        works = [dist.all_reduce(value, group=group, async_op=True) for value in values]
    for work in works:
        work.wait()
    assert values == [torch.tensor([2.0])] * 2


@ranks(2)
def test_closing_ends_every_group(rank: int, world: int, tmp_path: Path) -> None:
    state = PartialState(cpu=True)
    extra = dist.new_group()
    state.destroy_process_group()
    assert not dist.is_initialized()
    del extra
    store = dist.FileStore(str(tmp_path / "again"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


@ranks(2)
def test_runs_after_each_other_leave_no_connections(rank: int, world: int) -> None:
    files = [open(os.devnull) for _ in range(1_100)]  # noqa: SIM115 - the watcher's connection comes after these
    counts = []
    for _ in range(12):
        port = free_ports(1)
        dist.broadcast_object_list(port)
        PartialState().destroy_process_group()
        PartialState._reset_state()
        os.environ["MASTER_PORT"] = str(port[0])
        state = PartialState(cpu=True)
        state.wait_for_everyone()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] < counts[2] + 30, counts  # each round has five connections or more
    for file in files:
        file.close()


@ranks(2)
def test_a_forked_process_leaves_what_its_parent_had_closed(rank: int, world: int, tmp_path: Path) -> None:
    for number in range(2):
        PartialState(cpu=True).destroy_process_group()
        start_group(tmp_path / f"parent {number}", rank, world)
    PartialState(cpu=True).destroy_process_group()
    left = [*shutdown._spent_before, *shutdown._spent]
    assert left
    if (child := os.fork()) == 0:  # freeing would wait for threads that it does not have, and crash now and then
        with contextlib.suppress(BaseException):
            for number in range(2):
                start_group(tmp_path / f"child {rank} {number}", 0, 1)
                dist.destroy_process_group()
            os._exit(0 if all(left) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    start_group(tmp_path / "again", rank, world)


def start_group(store: Path, rank: int, world: int) -> None:
    """Start a default process group on a new store, as `PartialState` does."""
    PartialState._reset_state()
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    shutdown.register()


# ---- when it happens --------------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was registered to run at exit, without running it when the tests end."""
    entries: list[Any] = []
    monkeypatch.setattr(shutdown.atexit, "register", entries.append)
    monkeypatch.setattr(shutdown, "_registered_in", None)
    monkeypatch.setattr(shutdown, "_callbacks", [])
    return entries


def test_it_is_registered_once_and_forked_processes_leave_the_group_to_their_parent(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown.register()
    shutdown.register()
    assert len(registered) == 1
    registered[0]()  # nothing is open
    monkeypatch.setattr(shutdown, "_registered_in", os.getpid() + 1)
    called = []
    shutdown.on_close(callback := lambda: called.append(1))
    registered[0]()
    assert not called
    assert callback is not None


@pytest.mark.parametrize("failed", [False, True])
def test_callbacks_run_at_exit_unless_the_process_failed(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError() if failed else None, raising=False)
    monkeypatch.setattr(sys, "last_exc", None, raising=False)
    called: list[Any] = []

    class Holder:
        def close(self) -> None:
            called.append(self)

    kept, gone = Holder(), Holder()

    def callback() -> None:
        called.append(callback)

    for each in (kept.close, gone.close, callback):
        shutdown.on_close(each)
    del gone, each
    gc.collect()
    shutdown.register()
    for _ in range(2):
        registered[0]()
    assert called == ([] if failed else [callback, kept])
