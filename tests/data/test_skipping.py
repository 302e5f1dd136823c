"""Starting in the middle of an epoch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from accel_data.loader_shard import DataLoaderShard
from accel_data.prepare import prepare_data_loader
from accel_data.samplers import SkipBatchSampler
from accel_data.skipping import SkipDataLoader, skip_first_batches
from accel_state.gradient_state import GradientState
from tests.data.sharing import Numbers
from tests.data.test_prepare import Squares


def lists(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_skipped_samples_are_not_read() -> None:
    data = Squares(10)
    rest = skip_first_batches(prepare_data_loader(DataLoader(data, batch_size=2)), 3)
    assert isinstance(rest, DataLoaderShard)
    assert (len(rest), rest.total_batch_size, rest.total_dataset_length) == (2, 2, 10)
    assert lists(rest) == [[6, 7], [8, 9]]
    assert data.read == [6, 7, 8, 9]


def test_a_shuffled_epoch_goes_on_where_it_was_left() -> None:
    def loader():
        plain = DataLoader(Squares(21), batch_size=2, shuffle=True)
        return prepare_data_loader(plain, num_processes=2, process_index=1, use_seedable_sampler=True, data_seed=1)

    whole, later = loader(), loader()
    epochs = [lists(whole) for _ in range(3)]
    later.set_epoch(1)
    rest = skip_first_batches(later, 2)
    assert lists(rest) == epochs[1][2:]
    later.set_epoch(2)
    assert lists(later) == epochs[2], "the loader itself is as before"


def test_skipping_adds_up_and_may_go_past_the_end() -> None:
    loader = prepare_data_loader(DataLoader(Squares(10), batch_size=2))
    assert lists(skip_first_batches(skip_first_batches(loader, 1), 2)) == [[6, 7], [8, 9]]
    past = skip_first_batches(loader, 9)
    assert (len(past), lists(past)) == (0, [])
    stream = prepare_data_loader(DataLoader(Numbers(10), batch_size=2))
    assert lists(skip_first_batches(skip_first_batches(stream, 1), 2)) == [[6, 7], [8, 9]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: skip_first_batches(prepare_data_loader(DataLoader(Squares(5), batch_size=2)), 1),
        lambda: DataLoaderShard(Squares(5), batch_size=2, skip_batches=1),  # as programs build it themselves
    ],
)
def test_the_last_batch_is_still_known(make: Callable[[], DataLoaderShard]) -> None:
    rest, state = make(), GradientState()
    assert [(state.end_of_dataloader, state.remainder) for _ in rest] == [(False, 1), (True, 1)]


def test_streams_are_read_from_the_start() -> None:
    stream = Numbers(9)
    rest = skip_first_batches(
        prepare_data_loader(DataLoader(stream, batch_size=2), num_processes=2, process_index=1), 1
    )
    assert lists(rest) == [[6, 7], [1, 2]]
    assert stream.num_read == 9


def test_plain_loaders_can_be_skipped_too() -> None:
    assert lists(skip_first_batches(DataLoader(Squares(6), batch_size=2), 2)) == [[4, 5]]
    rest = skip_first_batches(DataLoader(Numbers(6), batch_size=2), 2)
    assert isinstance(rest, SkipDataLoader)
    assert lists(rest) == [[4, 5]]
    assert len(skip_first_batches(DataLoader(Squares(6), batch_size=2, num_workers=0, pin_memory=False), 0)) == 3


def test_a_batch_sampler_given_as_sampler() -> None:
    batches = BatchSampler(SequentialSampler(range(6)), 2, False)
    plain = DataLoader(torch.arange(6), sampler=batches, batch_size=None)
    assert lists(skip_first_batches(prepare_data_loader(plain), 1)) == [[2, 3], [4, 5]]


def test_the_skipping_sampler_passes_attributes_on() -> None:
    sampler = SkipBatchSampler(BatchSampler(SequentialSampler(range(7)), 2, False), 3)
    assert (len(sampler), sampler.total_length, sampler.batch_size, list(sampler)) == (1, 4, 2, [[6]])


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="num_batches=-1"):
        skip_first_batches(DataLoader(Squares(4)), -1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_going_on_draws_no_random_numbers_to_begin_with(workers: int, shuffle: bool) -> None:
    plain = DataLoader(Squares(10), batch_size=2, shuffle=shuffle, num_workers=workers)
    loader = prepare_data_loader(plain, use_seedable_sampler=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for _ in skip_first_batches(skip_first_batches(loader, 1), 0):
        assert torch.equal(torch.get_rng_state(), before)
        break
    for _ in loader:
        assert not torch.equal(torch.get_rng_state(), before), "an epoch that begins is another matter"
        break


def test_an_order_drawn_at_random_does_not_come_twice() -> None:
    loader = prepare_data_loader(DataLoader(Squares(40), batch_size=2, shuffle=True))
    rest = lists(skip_first_batches(loader, 1))
    assert lists(loader)[1:] != rest


@pytest.mark.parametrize("skipped", [0, 1])
def test_the_epoch_after_the_one_that_was_continued_is_the_next(skipped: int) -> None:
    """A run that resumes where an epoch began skips nothing; its next epoch must not come in the same order."""

    def prepared() -> Any:
        return prepare_data_loader(
            DataLoader(Squares(12), batch_size=2, shuffle=True), use_seedable_sampler=True, data_seed=1
        )

    whole, continued = prepared(), prepared()
    epochs = [lists(whole), lists(whole)]
    assert [lists(skip_first_batches(continued, skipped)), lists(continued)] == [epochs[0][skipped:], epochs[1]]


@pytest.mark.parametrize("wrong", [1.5, None, "1"])
def test_a_number_of_batches_is_an_integer(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"num_batches=.*must be an integer"):
        skip_first_batches(DataLoader(range(4)), wrong)
    assert len(skip_first_batches(DataLoader(range(4)), torch.tensor(1))) == 3


class ByEpoch(Sampler):  # type: ignore[type-arg]
    """A batch sampler whose order depends on the epoch that it was told."""

    batch_size, drop_last, epoch = None, True, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.epoch, place] for place in range(4)])

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("skipped", [0, 2])
def test_the_epoch_that_a_program_told_its_batch_sampler_stays(skipped: int) -> None:
    loader = prepare_data_loader(DataLoader(Squares(8), batch_sampler=ByEpoch()), even_batches=False)
    rest = skip_first_batches(loader, skipped)
    loader.batch_sampler.set_epoch(3)
    assert lists(rest) == [[3, place] for place in range(skipped, 4)]
