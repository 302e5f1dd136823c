"""The rank pool itself: bodies really run in a group, and failures name their rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks as pools
from tests.support.leaks import gloo_threads
from tests.support.ranks import POOL, ranks

KEPT: list[dist.ProcessGroup] = []


@ranks(1, 2, 4)
def test_a_body_runs_in_a_group(rank: int, world: int) -> None:
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert dist.get_world_size() == world
    assert total.item() == world * (world + 1) // 2


@ranks(2)
@pytest.mark.parametrize("value", [3, 5])
def test_ranks_share_fixtures_and_parameters(rank: int, value: int, tmp_path: Path) -> None:
    (tmp_path / str(rank)).write_text(str(value))
    dist.barrier()
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [str(value)] * 2


@ranks(2)
def _fails_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def test_a_failure_names_its_rank_and_the_pool_recovers() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1 of 2.*ValueError: only here"):
        _fails_on_rank_one()
    test_a_body_runs_in_a_group(world=2)


@ranks(1)
def _ends_as_compiled_code_does() -> None:
    os.write(2, b"free(): invalid pointer\n")
    os.abort()


def test_a_process_that_compiled_code_ends_says_why_and_where() -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)code -6.*free\(\): invalid pointer.*in _ends_as_compiled_code"
    ):
        _ends_as_compiled_code_does()


def test_pool_is_one() -> None:
    assert len(POOL.workers) <= 4


@ranks(1)
def _keeps_its_groups(rank: int) -> None:
    KEPT.extend(dist.new_group() for _ in range(3))


def test_workers_in_which_groups_are_left_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_GROUPS", 2)
    monkeypatch.setattr(pools, "POOL", pool := pools.Pool())
    _keeps_its_groups()
    first = pool.workers[0][0].pid
    actual = gloo_threads(first)
    _keeps_its_groups()
    second = pool.workers[0][0].pid
    pool.close(politely=True)
    if not actual:
        pytest.skip("threads are not listed here, or have no names: those of torch 2.9")
    assert actual == 3
    assert second != first


@ranks(2)
def test_what_is_patched_on_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "linesep", "patched")


@ranks(2)
def test_is_undone_on_ranks_afterwards(rank: int) -> None:
    assert os.linesep == "\n"
