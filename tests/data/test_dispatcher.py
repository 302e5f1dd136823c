"""One process reads for all: real groups."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from accel_data.dispatcher import DataLoaderDispatcher, _data_ranks_of
from accel_data.prepare import prepare_data_loader
from accel_data.skipping import skip_first_batches
from accel_ops.collectives.tensors import gather
from tests.data.sharing import Numbers, SizedNumbers, padded_samples, shard_of
from tests.data.test_prepare import Squares
from tests.support.ranks import ranks


def make(data: Any, size: int, **options: Any) -> DataLoaderDispatcher:
    split = options.pop("split_batches", False)
    slice_fn = options.pop("slice_fn", None)
    plain = DataLoader(data, batch_size=size, **options)
    loader: Any = prepare_data_loader(
        plain,
        torch.device("cpu"),
        put_on_device=True,
        dispatch_batches=True,
        split_batches=split,
        slice_fn_for_dispatch=slice_fn,
    )
    assert isinstance(loader, DataLoaderDispatcher)
    return loader


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def for_metrics(loader: Any) -> list[int]:
    actual: list[int] = []
    for batch in loader:
        gathered = gather(batch)
        if loader.end_of_dataloader and loader.remainder > 0:
            gathered = gathered[: loader.remainder]
        actual += gathered.tolist()
    return actual


@ranks(2, 3)
def test_every_length_is_shared_out_as_in_shard_mode(rank: int, world: int) -> None:
    for length in (1, 2, 3, 7, 12, 13):
        for drop_last in (False, True):
            for split in (False, True):
                loader = make(Squares(length), 2 * (world if split else 1), drop_last=drop_last, split_batches=split)
                full = shard_of(padded_samples(length, 2 * world, True), 2, world, rank)
                assert lists(loader)[: len(full)] == full
                whole = list(range(length - length % (2 * world) if drop_last else length))
                assert for_metrics(loader) == whole
                assert loader.total_batch_size == 2 * world
                assert loader.total_dataset_length == length
                assert len(loader) == len(lists(loader))


@ranks(2, 4)
def test_only_the_first_process_reads_a_stream(rank: int, world: int) -> None:
    stream = Numbers(13)
    loader = make(stream, 2)
    assert for_metrics(loader) == list(range(13))
    assert stream.num_read == (13 if rank == 0 else 0)
    assert make(SizedNumbers(13), 2).total_dataset_length == 13


@ranks(2)
def test_what_is_empty_has_no_batches(rank: int, world: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Squares has length 0")
        for loader in (make(Numbers(0), 2), make(Squares(0), 2), make(Squares(0), 2, split_batches=True)):
            assert lists(loader) == lists(loader) == for_metrics(loader) == []


@ranks(3)
def test_processes_receive_their_shard_of_the_bytes_and_the_structure_once(rank: int, world: int) -> None:
    received, objects = [], []
    recv, broadcast_object_list = dist.recv, dist.broadcast_object_list

    def counting_recv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(tensor.numel() * tensor.element_size())
        return recv(tensor, *args, **kwargs)

    def counting_broadcast(*args: Any, **kwargs: Any) -> Any:
        objects.append(1)
        return broadcast_object_list(*args, **kwargs)

    dist.recv, dist.broadcast_object_list = counting_recv, counting_broadcast
    try:
        # 8 samples of 4 KiB for each process in a round, 5 rounds, the last one ragged
        data = TensorDataset(torch.randn(8 * 3 * 4 + 5, 1024), torch.arange(8 * 3 * 4 + 5))
        sizes = [len(numbers) for _, numbers in make(data, 8)]
    finally:
        dist.recv, dist.broadcast_object_list = recv, broadcast_object_list
    assert sizes == [8, 8, 8, 8, 2]
    share = 8 * (4096 + 8)
    if rank > 0:
        assert max(received) <= share + 64, "a share and a short header, not the bytes of all"
        assert len(received) == 5 + 2
    else:
        assert not received
    assert len(objects) == 2, "the structure is told at the beginning, and when the last round is smaller"


@ranks(2)
def test_structure_and_dtypes_may_change_between_rounds(rank: int, world: int) -> None:
    def collate(items: list[int]) -> Any:
        kinds = {
            0: {"x": torch.tensor([1.0, 2.0])},
            2: {"x": torch.tensor([[3, 4], [5, 6]]), "more": (torch.tensor([True, False]), torch.zeros(2, 0))},
            4: [torch.tensor([7, 8], dtype=torch.bfloat16)],
        }
        return kinds[items[0]]

    first, second, third = make(Squares(6), 2, split_batches=True, collate_fn=collate)
    assert first["x"].tolist() == [1.0 + rank]
    assert second["x"].tolist() == [[3 + 2 * rank, 4 + 2 * rank]]
    assert second["more"][0].tolist() == [rank == 0]
    assert second["more"][1].shape == (1, 0)
    assert isinstance(second["more"], tuple)
    assert isinstance(third, list)
    assert third[0].dtype == torch.bfloat16
    assert third[0].tolist() == [7.0 + rank]


@ranks(2)
def test_rounds_of_any_size_keep_every_sample(rank: int, world: int) -> None:
    class Ragged(BatchSampler):
        batch_size, drop_last = 4, False

        def __init__(self, batches: list[list[int]]) -> None:
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

        def __len__(self) -> int:
            return len(self.batches)

    def loader(batches: list[list[int]]) -> Any:
        plain = DataLoader(Squares(9), batch_sampler=Ragged(batches))
        return prepare_data_loader(plain, put_on_device=True, dispatch_batches=True, split_batches=True)

    assert lists(loader([[0, 1, 2], [3, 4], [5, 6, 7]])) == [[[0, 1], [3], [5, 6]], [[2], [4], [7, 0]]][rank]
    with pytest.raises(ValueError, match="global batch of 1 samples in the middle of the data.*over 2 processes"):
        lists(loader([[0, 1], [2], [3, 4]]))


class Unreadable(Exception):
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")


@ranks(2)
def test_an_error_while_reading_reaches_every_process(rank: int, world: int) -> None:
    class Broken(Squares):
        def __init__(self, error: Exception, at: int) -> None:
            super().__init__(20)
            self.error, self.at = error, at

        def __getitem__(self, index: int) -> int:
            if index == self.at:
                raise self.error
            return index

    for at in (0, 13):
        with pytest.raises(KeyError, match="no such sample"):
            lists(make(Broken(KeyError("no such sample"), at), 2))
    wanted = Unreadable if rank == 0 else RuntimeError  # it cannot be pickled and read again
    with pytest.raises(wanted, match="data.txt:3"):
        lists(make(Broken(Unreadable("data.txt", 3), 9), 2))
    with pytest.raises(RuntimeError, match="cannot cut"):
        lists(make(Squares(8), 2, slice_fn=_no_slicing))
    assert lists(make(Squares(4), 2)) == [[2 * rank, 2 * rank + 1]], "the processes are still in step"


def _no_slicing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("cannot cut")


@ranks(2)
def test_strings_come_with_their_numbers(rank: int, world: int) -> None:
    class Texts(Squares):
        def __getitem__(self, index: int) -> Any:
            return index, str(index)

    for split in (False, True):
        for numbers, texts in make(Texts(5), 2, split_batches=split):
            assert list(texts) == [str(number) for number in numbers.tolist()]


@ranks(2)
def test_what_cannot_be_pickled_is_an_error_on_all_ranks(rank: int, world: int) -> None:
    with pytest.raises(Exception, match="pickle"):
        list(make(Squares(8), 2, collate_fn=lambda items: {"x": torch.tensor(items), "read": (_ for _ in items)}))


@ranks(2)
def test_epochs_shuffle_on_the_reader_and_may_be_left_early(rank: int, world: int) -> None:
    torch.manual_seed(rank)  # generators apart: the dispatcher brings them together
    loader = make(Squares(16), 2, shuffle=True)
    first = for_metrics(loader)
    for _ in loader:
        break
    assert loader.gradient_state.active_dataloader is None
    second = for_metrics(loader)
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second


@ranks(2)
def test_skipping_leaves_out_padded_samples(rank: int, world: int) -> None:
    data = Squares(14)
    whole = lists(make(data, 2))
    data.read.clear()
    rest = skip_first_batches(make(data, 2), 2)
    assert len(rest) == len(whole) - 2
    # 12 and 13 remain for the last round, one for each
    assert lists(rest) == whole[2:] == [[8 + 2 * rank, 9 + 2 * rank], [12 + rank]]
    assert min(data.read, default=99) == (8 if rank == 0 else 99), "skipped samples are not read"
    stream = lists(skip_first_batches(make(Numbers(14), 2), 2))
    assert stream == whole[2:]
    split = skip_first_batches(make(Squares(12), 4, split_batches=True), 2)
    assert lists(split) == [[8 + 2 * rank, 9 + 2 * rank]]


@ranks(2)
def test_a_slice_function_of_the_user_cuts(rank: int, world: int) -> None:
    seen = []

    def every_other(data: Any, tensor_slice: slice, process_index: int, num_processes: int) -> Any:
        seen.append((process_index, num_processes))
        return data[process_index::num_processes]

    assert lists(make(Squares(4), 4, split_batches=True, slice_fn=every_other)) == [[rank, rank + 2]]
    assert ((1, 2) in seen) == (rank == 0)


def test_one_process_reads_for_itself() -> None:
    loader = make(Squares(5), 2)
    assert lists(loader) == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3
    assert (loader.iteration, loader.end_of_dataloader) == (1, True)


def test_processes_along_model_axes_share_their_data() -> None:
    class Mesh:
        mesh_dim_names = ("dp_replicate", "tp")
        mesh = torch.arange(4).view(2, 2)

    assert _data_ranks_of(Mesh) == [0, 0, 1, 1]


def padded(rows: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


@ranks(2, 3)
def test_batches_of_rows_of_different_lengths_are_dealt_out_whole(rank: int, world: int) -> None:
    for length in range(1, 6 * world + 2):
        data = [[number] * (1 + number % 4) for number in range(1, length + 1)]
        for split, drop_last in ((False, False), (False, True), (True, False), (True, True)):
            size = 3 * world if split else 3
            loader = make(data, size, collate_fn=padded, drop_last=drop_last, split_batches=split)
            real: list[int] = []
            for batch in loader:
                assert all(row.tolist() == padded([data[row[0] - 1], batch[0].tolist()])[0].tolist() for row in batch)
                gathered = gather(batch[:, 0].contiguous()).tolist()
                real += gathered[: loader.remainder] if loader.end_of_dataloader else gathered
            assert real == list(range(1, (length - length % (3 * world) if drop_last else length) + 1))


@ranks(2)
def test_each_process_gets_its_batch_as_it_was_read(rank: int) -> None:
    data = [[number] * (1 + number % 4) for number in range(1, 25)]
    actual = list(make(data, 3, collate_fn=padded))
    expected = list(DataLoader(data, batch_size=3, collate_fn=padded))[rank::2]
    assert len(actual) == len(expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


def with_total(numbers: list[int]) -> dict[str, torch.Tensor]:
    return {"rows": torch.tensor(numbers), "total": torch.tensor(numbers).sum()}


@ranks(2)
def test_a_value_of_a_whole_batch_stays_with_it(rank: int, world: int) -> None:
    for batch in make(Squares(8), 2, collate_fn=with_total):
        assert batch["total"] == batch["rows"].sum()
    for batch in make(Squares(8), 4, collate_fn=with_total, split_batches=True):
        assert batch["total"] > batch["rows"].sum()  # that of all ranks


@ranks(2)
def test_a_short_batch_amid_the_last_round_cannot_be_filled_up(rank: int) -> None:
    batches = [padded([[1]]), padded([[2, 2], [3, 3]])]
    loader = make(batches, 1, collate_fn=lambda one: one[0])
    with pytest.raises(ValueError, match=r"batches of \[1, 2\] samples whose rows differ in length.*pad all"):
        list(loader)
