"""Prepared data loaders on real groups: everything is read once, and gathered once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.prepare import prepare_data_loader
from accel_data.skipping import skip_first_batches
from accel_ops.collectives import gather, gather_object
from accel_state.gradient_state import GradientState
from tests.data.test_shards import Sharded, Stream
from tests.support.ranks import ranks


def metrics(loader: Any) -> list[int]:
    """What `gather_for_metrics` collects over an epoch."""
    state, found = GradientState(), []
    for batch in loader:
        real = getattr(loader, "num_real_samples", None)
        everything = gather(batch if real is None else batch[:real]).tolist()
        cut = state.end_of_dataloader and state.remainder > 0
        found += everything[: state.remainder] if cut else everything
    return found


@ranks(2, 4)
@pytest.mark.parametrize("length", [1, 3, 7, 16, 21])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
def test_metrics_see_exactly_the_data_set(rank: int, world: int, length: int, split: bool, dispatch: bool) -> None:
    for data in (range(length), Stream(length)):
        loader = prepare_data_loader(
            DataLoader(data, batch_size=4),  # type: ignore[arg-type]
            split_batches=split,
            dispatch_batches=dispatch,
            put_on_device=True,
        )
        assert isinstance(loader, DataLoaderDispatcher) is dispatch
        for _ in range(2):
            assert metrics(loader) == list(range(length))


@ranks(2)
def test_a_dispatched_stream_is_read_by_one(rank: int, world: int) -> None:
    data = Stream(10)
    loader = prepare_data_loader(DataLoader(data, batch_size=2), put_on_device=True)
    assert metrics(loader) == list(range(10))
    assert gather_object([data.num_read]) == [10, 0]


@ranks(2)
def test_a_divided_stream_is_read_once(rank: int, world: int) -> None:
    class Counting(Sharded):
        def split_for_process(self, index: int, count: int) -> Counting:
            part = Counting(self.length)
            part.own = range(index, self.length - (index == 0) * 4, count)  # the first part is shorter
            part.counts = self
            return part

        def __iter__(self) -> Iterator[int]:
            for value in self.own:
                self.counts.num_read += 1
                yield value

    data = Counting(20)
    loader = prepare_data_loader(DataLoader(data, batch_size=3), put_on_device=True)
    found = metrics(loader)
    assert sorted(found) == sorted([*range(0, 16, 2), *range(1, 20, 2)])
    assert sum(gather_object([data.num_read])) == 18


@ranks(2)
def test_each_process_receives_only_its_share(rank: int, world: int) -> None:
    data = [{"x": torch.randn(1000), "y": index} for index in range(32)]
    loader = prepare_data_loader(
        DataLoader(data, batch_size=8),
        dispatch_batches=True,
        put_on_device=True,  # type: ignore[arg-type]
    )
    received = []
    scatter = dist.scatter

    def counting(buffer: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(buffer.numel())
        return scatter(buffer, *args, **kwargs)

    with (
        mock.patch.object(dist, "scatter", counting),
        mock.patch.object(dist, "broadcast_object_list", wraps=dist.broadcast_object_list) as structures,
    ):
        batches = list(loader)
    assert [batch["x"].shape for batch in batches] == [torch.Size([8, 1000])] * 2
    assert structures.call_count == 1, "the structure is sent when it changes, not with every batch"
    assert max(received) < 2 * 8 * 1000 * 4


@ranks(2)
def test_an_error_while_reading_reaches_everyone(rank: int, world: int) -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(6)
            raise OSError("the disk is gone")

    loader = prepare_data_loader(DataLoader(Broken(), batch_size=1), put_on_device=True)
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader)
    words = prepare_data_loader(
        DataLoader(["a", "b"], batch_size=1),
        dispatch_batches=True,
        put_on_device=True,  # type: ignore[arg-type]
    )
    with pytest.raises(TypeError, match="'a'|str"):
        list(words)
    assert gather(torch.tensor(rank)).tolist() == [0, 1]


@ranks(2)
def test_shuffling_is_the_same_everywhere(rank: int, world: int) -> None:
    torch.manual_seed(rank)  # different on purpose
    loader = prepare_data_loader(
        DataLoader(range(16), batch_size=2, shuffle=True),
        rng_types=["generator"],  # type: ignore[arg-type]
    )
    epochs = [metrics(loader) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(16))
    assert epochs[0] != epochs[1]


@ranks(2)
@pytest.mark.parametrize("dispatch", [False, True])
def test_resuming_in_the_middle(rank: int, world: int, dispatch: bool) -> None:
    for data in (range(16), Stream(16)):
        loader = prepare_data_loader(
            DataLoader(data, batch_size=2),
            dispatch_batches=dispatch,
            put_on_device=True,  # type: ignore[arg-type]
        )
        rest = skip_first_batches(loader, 1)
        assert metrics(rest) == list(range(4, 16))
        assert len(rest) == 3 or isinstance(data, Stream)


@ranks(2)
def test_slices_of_ones_own(rank: int, world: int) -> None:
    def every_other(batch: torch.Tensor, part: slice, process_index: int, num_processes: int) -> torch.Tensor:
        return batch[process_index::num_processes]

    loader = prepare_data_loader(
        DataLoader(range(8), batch_size=4),  # type: ignore[arg-type]
        split_batches=True,
        dispatch_batches=True,
        put_on_device=True,
        slice_fn_for_dispatch=every_other,
    )
    assert [batch.tolist() for batch in loader] == [[rank, rank + 2], [rank + 4, rank + 6]]
