"""Streams that can be divided at their source: together the processes read each sample once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data.loader_shard import DataLoaderShard
from accel_data.prepare import prepare_data_loader
from accel_data.skipping import skip_first_batches
from accel_data.streams import SplitStream, find_split
from accel_ops.batches import slice_tensors
from accel_ops.collectives.tensors import gather
from tests.data.sharing import Numbers
from tests.support.ranks import ranks


class Files(IterableDataset):  # type: ignore[type-arg]
    """A stream over files of different lengths."""

    def __init__(self, files: list[list[int]]) -> None:
        self.files = files
        self.num_read = 0
        self.epoch = -1

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            for number in file:
                self.num_read += 1
                yield number

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Own(Files):
    def split_for_process(self, index: int, count: int) -> "Own":
        return Own(self.files[index::count])


class Already(Files):
    is_split_for_process = True


def files(lengths: list[int]) -> list[list[int]]:
    start = [sum(lengths[:index]) for index in range(len(lengths))]
    return [list(range(begin, begin + length)) for begin, length in zip(start, lengths, strict=True)]


def prepare(stream: Any, size: int = 2, **options: Any) -> Any:
    return prepare_data_loader(DataLoader(stream, batch_size=size), put_on_device=True, **options)


def gathered_once(loader: Any) -> list[int]:
    """What all processes got together, without repeated batches."""
    actual: list[int] = []
    for batch in loader:
        actual += gather(slice_tensors(batch, slice(loader.num_real_samples))).tolist()
    return actual


def test_what_can_be_divided() -> None:
    parts = files([1, 2, 3, 4])
    assert find_split(Own(parts), 2, 3).files == [parts[2]]
    assert find_split(Numbers(4), 0, 2) is None


def test_one_process_reads_the_whole_stream() -> None:
    loader = prepare(Own(files([2, 3])))
    assert not isinstance(loader.dataset, SplitStream)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


@ranks(2, 4)
def test_together_they_read_every_sample_once(rank: int, world: int) -> None:
    for lengths in ([4, 4, 4, 4], [5, 1, 9, 2], [1, 1, 1, 7]):
        loader = prepare(Own(files(lengths)))
        assert isinstance(loader, DataLoaderShard)
        for epoch in range(2):
            assert sorted(gathered_once(loader)) == list(range(sum(lengths)))
            assert loader.dataset.dataset.epoch == epoch
        assert loader.dataset.dataset.num_read == 2 * sum(lengths[rank::world])


@ranks(2)
def test_a_stream_that_is_split_already_is_left_alone(rank: int, world: int) -> None:
    loader = prepare(Already(files([3 + rank])))
    assert len(gathered_once(loader)) == 7


@ranks(2)
def test_all_processes_take_equally_many_steps(rank: int, world: int) -> None:
    loader = prepare(Own(files([2, 7])), split_batches=False)
    seen = [(batch.tolist(), loader.num_real_samples, loader.end_of_dataloader) for batch in loader]
    if rank == 0:
        assert seen == [([0, 1], None, False)] + [([0, 1], 0, False)] * 2 + [([0, 1], 0, True)]
    else:
        assert [batch for batch, _, _ in seen] == [[2, 3], [4, 5], [6, 7], [8]]
        assert [is_last for _, _, is_last in seen] == [False, False, False, True]


@ranks(2)
def test_split_batches_divides_the_size(rank: int, world: int) -> None:
    loader = prepare(Own(files([4, 4])), size=4, split_batches=True)
    assert [len(batch) for batch in loader] == [2, 2]
    assert loader.total_batch_size == 4


@ranks(2)
def test_skipping_reads_on_in_the_same_part(rank: int, world: int) -> None:
    rest = skip_first_batches(prepare(Own(files([6, 6]))), 1)
    assert [batch.tolist() for batch in rest] == [[[2, 3], [4, 5]], [[8, 9], [10, 11]]][rank]


@ranks(2)
def test_a_process_without_any_sample_is_an_error_on_all(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="1 of the processes got no sample of the sharded stream"):
        list(prepare(Own(files([4, 0]))))
    assert list(prepare(Own(files([0, 0])))) == []


@ranks(2)
def test_generators_are_brought_together_at_the_beginning_of_an_epoch(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    data = torch.arange(16)
    plain = DataLoader(data, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    loader = prepare_data_loader(plain, rng_types=["generator"])
    actual = []
    for _ in range(2):
        epoch = torch.cat(list(loader))
        everyone = [torch.empty_like(epoch) for _ in range(world)]
        dist.all_gather(everyone, epoch)
        actual.append(torch.cat(everyone).tolist())
    assert sorted(actual[0]) == sorted(actual[1]) == list(range(16))
    assert actual[0] != actual[1]


@ranks(2)
def test_unsplittable_streams_are_read_in_full_by_each(rank: int, world: int) -> None:
    stream = Numbers(9)
    loader = prepare_data_loader(DataLoader(stream, batch_size=2), dispatch_batches=False)
    assert [len(batch) for batch in loader] == [2, 2, 2]
    assert stream.num_read == 9
    assert loader.dataset.last_batch_size == 1  # type: ignore[attr-defined]


class SharedOut(IterableDataset):  # type: ignore[type-arg]
    """A stream that its workers share out."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from self.items[info.id :: info.num_workers] if info else self.items


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_say_what_of_them_is_padding(workers: int) -> None:
    batches = list(torch.arange(20).split(4))
    for items, size in ((list(range(17)), 2), (list(range(9)), 4), (batches, None)):
        plain: Any = DataLoader(SharedOut(items), batch_size=size, num_workers=workers)
        read: list[int] = []
        for index in range(2):
            loader = prepare_data_loader(plain, num_processes=2, process_index=index, dispatch_batches=False)
            for batch in loader:
                read += batch[: loader.num_real_samples].tolist()  # type: ignore[attr-defined]
            if workers or size is None:
                assert loader.remainder == 0, "of which gather_for_metrics would leave out more"  # type: ignore[attr-defined]
        assert sorted(read) == list(range(20 if size is None else len(items)))
