"""The gloo groups of a device mesh have one thread: of two, one can end the process while it writes what the other reads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import ParallelismConfig
from accel_state.gloo_groups import one_thread_each
from tests.support.ranks import ranks


def options_of(group: dist.ProcessGroup | None) -> Any:
    assert group is not None
    return group._get_backend(torch.device("cpu")).options


@ranks(4)
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_every_group_of_a_mesh_has_one_thread(axis: str) -> None:
    for sizes in ({f"{axis}_size": 4}, {f"{axis}_size": 2, "dp_shard_size": 2}):
        mesh = ParallelismConfig(**sizes).get_device_mesh("cpu")
        assert mesh is not None
        for group in mesh.get_all_groups():
            assert options_of(group)._threads == 1
            total = torch.ones(2)
            dist.all_reduce(total, group=group)
            assert total.tolist() == [dist.get_world_size(group)] * 2
    assert options_of(dist.GroupMember.WORLD)._threads == options_of(dist.new_group())._threads == 2


@ranks(2)
def test_groups_of_such_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their other options are torch's own. Replicas share the default group: DDP has many all-reduces under way."""
    mesh = ParallelismConfig(dp_replicate_size=2).get_device_mesh("cpu")
    assert mesh is not None
    assert mesh.get_group() is dist.GroupMember.WORLD
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with one_thread_each(), one_thread_each():
        named = dist.new_group(timeout=timedelta(seconds=77))
    assert options_of(named)._threads == 1
    assert options_of(named)._timeout == timedelta(seconds=77)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    gloo: Any = dist.ProcessGroupGloo
    with one_thread_each():
        options = gloo._Options()
        options._threads, options._devices = 3, [gloo.create_default_device()]
        assert gloo(dist.HashStore(), 0, 1, options).options._threads == 3
        assert gloo(store=dist.HashStore(), rank=0, size=1).options._timeout == dist.default_pg_timeout
    assert options_of(dist.new_group())._threads == 2


@ranks(1)
def test_an_interface_that_does_not_exist_is_torchs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(RuntimeError, match="nosuch0"), one_thread_each():
        dist.new_group()
