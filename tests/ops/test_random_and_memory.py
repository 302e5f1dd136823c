"""Seeds and random states; memory that runs out."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from accel_ops.memory import (
    clear_device_cache,
    convert_bytes,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from accel_ops.random import (
    capture_rng_state,
    restore_rng_state,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from tests.support.ranks import ranks


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeds() -> None:
    set_seed(3)
    first = draw()
    set_seed(3)
    assert draw() == first
    set_seed(2**32 + 1)  # numpy takes no more than 32 bits
    set_seed(3, device_specific=True)
    assert draw() == first, "the first process adds nothing"
    set_seed(np.int64(3))
    assert draw() == first


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        ("7", TypeError, r"set_seed\('7'\): a str is no seed"),
        (1.5, TypeError, r"set_seed\(1.5\): a float is no seed"),
        (2**64, ValueError, r"set_seed\(18446744073709551616\): torch takes seeds from"),
        (-(2**63) - 1, ValueError, "torch takes seeds from"),
    ],
)
def test_seeds_that_are_none_change_nothing(seed: object, error: type[Exception], message: str) -> None:
    before = random.getstate()
    with pytest.raises(error, match=message):
        set_seed(seed)  # type: ignore[arg-type]
    assert random.getstate() == before


def test_deterministic() -> None:
    set_seed(1, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_states_come_back() -> None:
    state = capture_rng_state()
    expected = draw()
    assert {"random_state", "numpy_random_seed", "torch_manual_seed"} <= set(state)
    restore_rng_state(state)
    assert draw() == expected
    restore_rng_state({})


@ranks(2)
def test_processes_draw_alike_after_synchronising(rank: int, world: int) -> None:
    from accel_ops.collectives.tensors import gather

    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    for which in (["torch", "generator"], None):
        torch.rand(rank + 1)
        torch.rand(rank + 1, generator=generator)
        synchronize_rng_states(which, generator)
        drawn = torch.stack([torch.rand(()), torch.rand((), generator=generator)])[None]
        actual = gather(drawn)
        assert torch.equal(actual[0], actual[1])
    torch.rand(rank + 1)
    synchronize_rng_states()
    actual = gather(torch.rand(1))
    assert actual[0] == actual[1]
    set_seed(5, device_specific=True)
    actual = gather(torch.rand(1))
    assert actual[0] != actual[1]
    with pytest.raises(ValueError, match="rng_type='cuda' names a device"):
        synchronize_rng_state("cuda")  # type: ignore[arg-type]


def test_synchronising_needs_a_generator() -> None:
    with pytest.raises(ValueError, match="needs the generator"):
        synchronize_rng_state("generator")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nonsense"):
        synchronize_rng_states(["nonsense"])


def test_out_of_memory_is_recognised() -> None:
    assert should_reduce_batch_size(torch.OutOfMemoryError("CUDA out of memory."))
    assert should_reduce_batch_size(RuntimeError("XPU out of memory. Tried to allocate"))
    failed = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert should_reduce_batch_size(RuntimeError(failed))  # a full GPU, when a library takes its first memory
    assert not should_reduce_batch_size(RuntimeError("shapes do not match"))
    assert not should_reduce_batch_size(ValueError("out of memory"))


def test_smaller_and_smaller() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size: int, other: str) -> tuple[int, str]:
        tried.append(batch_size)
        if batch_size > 100:
            raise RuntimeError("CUDA out of memory.")
        return batch_size, other

    assert train("x") == (92, "x") or train("x")[0] <= 100
    assert tried[:2] == [128, 115]
    with pytest.raises(TypeError, match="leave it out"):
        train(128, "x")

    tried.clear()
    train("y")
    assert tried == [92], "a later call begins with what was found"

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: 0)
    def never(batch_size: int) -> None:
        raise torch.OutOfMemoryError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="No executable batch size found for never"):
            never()

    @find_executable_batch_size
    def broken(batch_size: int) -> None:
        raise KeyError("something else")

    with pytest.raises(KeyError):
        broken()


@ranks(2)
def test_all_processes_agree_on_the_size(rank: int, world: int) -> None:
    from accel_state.processes import PartialState

    PartialState()
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if rank == 1 and batch_size > 85:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return batch_size

    assert train() == 81
    assert tried == [100, 90, 81]


@ranks(2)
def test_a_rank_that_ran_out_of_memory_enters_no_collective(rank: int, world: int) -> None:
    """Else it would meet the other rank in a collective of the function, with another number of elements."""
    from datetime import timedelta

    import torch.distributed as dist

    from accel_state.processes import PartialState

    PartialState()
    results = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> float:
        if rank == 1 and batch_size == 10:
            raise RuntimeError("out of memory")
        values = torch.ones(batch_size)
        if rank == 0 and batch_size == 10:  # waits for rank 1, but not for ever
            values = torch.ones(1, dtype=torch.int32)
            with pytest.raises(RuntimeError, match=r"[Tt]imed out|[Tt]imeout"):
                dist.all_reduce(values, group=patient)
            results.append(int(values))
            return 0.0
        dist.all_reduce(values)
        return float(values.sum())

    patient = dist.new_group(timeout=timedelta(seconds=1))
    assert dist.group.WORLD is not None
    before = dist.group.WORLD._get_sequence_number_for_group()
    assert train() == 9 * 2
    assert dist.group.WORLD._get_sequence_number_for_group() - before == 1, "the function's own"
    assert results == ([1] if rank == 0 else [])

    @find_executable_batch_size(starting_batch_size=10)
    def broken(batch_size: int) -> None:
        if rank == 1:
            raise KeyError("something else")

    with pytest.raises(
        *((KeyError,) if rank == 1 else (RuntimeError,)), match="something else|Rank 1 raised an error"
    ):
        broken()


def test_a_function_may_end_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_state.processes import PartialState

    PartialState()
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)  # of a group that is no longer there

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> int:
        if batch_size > 9:
            raise RuntimeError("out of memory")
        return batch_size

    assert train() == 9


@ranks(2)
def test_a_rank_that_does_not_finish_is_an_error(rank: int, world: int) -> None:
    from accel_ops.collectives import store_exchange
    from accel_state.processes import PartialState

    PartialState()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_exchange, "group_timeout", lambda group: 0.2)

        @find_executable_batch_size(starting_batch_size=10)
        def train(batch_size: int) -> None:
            raise RuntimeError("out of memory")

        if rank == 0:  # rank 1 never gets as far
            with pytest.raises(
                RuntimeError, match=r"Rank 1 has not finished its attempt within 0.2 s.*'out of memory'"
            ):
                train()


def test_letting_go() -> None:
    assert release_memory([1], {}) == [None, None]
    assert convert_bytes(1500) == "1.46 KB"


def test_what_nothing_reaches_is_collected_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda collect=gc.collect: collected.append(collect()))
    collected: list[int] = []
    clear_device_cache()
    assert collected == []
    clear_device_cache(garbage_collection=True)
    assert len(collected) == 1


def test_bytes_are_written_for_people() -> None:
    assert convert_bytes(3 * 1024**5) == "3.0 PB"
