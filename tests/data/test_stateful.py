"""Loaders that store their position themselves, through torchdata."""

import multiprocessing
import pickle
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data.prepare import prepare_data_loader
from accel_data.skipping import SkipDataLoader, skip_first_batches
from tests.data.sharing import Numbers
from tests.data.test_prepare import Squares
from tests.data.test_skipping import lists

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own call


def make(data, **options):
    return prepare_data_loader(DataLoader(data, batch_size=2, **options), use_stateful_dataloader=True)


UNDER_COVERAGE = pytest.mark.skipif("coverage" in sys.modules, reason="forked workers now and then die under coverage")


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=UNDER_COVERAGE)])
@pytest.mark.parametrize("data", [Squares, Numbers])
def test_an_epoch_goes_on_after_the_batch_that_was_handed_out_last(data, num_workers: int) -> None:
    loader = make(data(11), num_workers=num_workers)
    position = None
    for step, batch in enumerate(loader):
        if step == 2:
            assert batch.tolist() == [4, 5]
            position = pickle.loads(pickle.dumps(loader.state_dict()))
            break
    assert position["_iterator_finished"] is False
    other = make(data(11), num_workers=num_workers)
    other.load_state_dict(position)
    assert lists(other) == [[6, 7], [8, 9], [10]]
    assert lists(other) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]


@pytest.mark.takes_turns
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=UNDER_COVERAGE)])
def test_nothing_is_read_before_the_sampler_is_known(num_workers: int) -> None:
    children = set(multiprocessing.active_children())

    def orders(**options):
        plain = DataLoader(Squares(24), batch_size=2, shuffle=True, num_workers=num_workers)
        loader = prepare_data_loader(plain, use_seedable_sampler=True, data_seed=3, **options)
        assert set(multiprocessing.active_children()) == children, "preparing starts no workers"
        return loader, [lists(loader) for _ in range(2)]

    _, expected = orders()
    loader, stateful = orders(use_stateful_dataloader=True)
    assert stateful == expected
    loader.set_epoch(1)
    before = torch.get_rng_state()
    assert loader.state_dict()["_iterator_finished"] is True, "the last epoch has ended"
    assert torch.equal(torch.get_rng_state(), before)
    assert lists(loader) == expected[1]


@pytest.mark.takes_turns
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=UNDER_COVERAGE)])
def test_the_position_before_the_first_batch(num_workers: int) -> None:
    def make_shuffled():
        torch.manual_seed(1)
        return make(Squares(12), shuffle=True, num_workers=num_workers)

    expected = [lists(loader := make_shuffled()), lists(loader)]
    loader = make_shuffled()
    children = set(multiprocessing.active_children())
    position = loader.state_dict()
    assert set(multiprocessing.active_children()) == children
    assert [lists(loader), lists(loader)] == expected, "asking changes nothing"
    other = make_shuffled()
    other.load_state_dict(position)
    assert [lists(other), lists(other)] == expected


@pytest.mark.takes_turns
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=UNDER_COVERAGE)])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_shuffled_epoch_goes_on_in_its_order(dispatch: bool, num_workers: int) -> None:
    def make_shuffled(seed: int):
        torch.manual_seed(seed)
        plain = DataLoader(Squares(13), batch_size=2, shuffle=True, num_workers=num_workers)
        options = {"dispatch_batches": dispatch, "put_on_device": dispatch, "use_stateful_dataloader": True}
        return prepare_data_loader(plain, **options)

    loader = make_shuffled(1)
    lists(loader)
    actual = []
    for batch in loader:
        actual.append(batch.tolist())
        if len(actual) == 3:
            position, numbers = pickle.loads(pickle.dumps(loader.state_dict())), torch.get_rng_state()
    other = make_shuffled(2)
    other.load_state_dict(position)
    torch.set_rng_state(numbers)
    assert lists(other) == actual[3:]
    assert torch.equal(torch.get_rng_state(), numbers), "the numbers of this epoch were drawn when it began"
    following = lists(other)
    torch.set_rng_state(numbers)
    assert lists(loader) == following


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_after_the_end_comes_a_whole_epoch(dispatch: bool, within: bool) -> None:
    def make_loader():
        options = {"dispatch_batches": dispatch, "put_on_device": dispatch, "use_stateful_dataloader": True}
        plain = DataLoader(Squares(12), batch_size=2, shuffle=True)
        return prepare_data_loader(plain, use_seedable_sampler=True, data_seed=2, **options)

    loader = make_loader()
    for _ in loader:
        if loader.end_of_dataloader:
            position = pickle.loads(pickle.dumps(loader.state_dict()))
    if not within:
        position = pickle.loads(pickle.dumps(loader.state_dict()))
    other = make_loader()
    other.load_state_dict(position)
    assert lists(other) == lists(loader)


def test_skipping_takes_the_place_of_a_position_that_was_loaded() -> None:
    loader = make(Squares(8))
    for _ in loader:
        position = loader.state_dict()
        break
    other = make(Squares(8))
    other.load_state_dict(position)
    assert lists(skip_first_batches(other, 1)) == [[2, 3], [4, 5], [6, 7]]
    assert lists(other) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_data_with_a_state_get_that_of_the_end() -> None:
    class Epochs(Numbers):
        epoch = 0

        def __iter__(self):
            yield from (100 * self.epoch + number for number in super().__iter__())
            self.epoch += 1

        def state_dict(self):
            return {"epoch": self.epoch}

        def load_state_dict(self, state):
            self.epoch = state["epoch"]

    loader = make(Epochs(4))
    lists(loader)
    other = make(Epochs(4))
    other.load_state_dict(loader.state_dict())
    assert lists(other) == lists(loader) == [[100, 101], [102, 103]]


def test_the_end_is_stored_as_such() -> None:
    loader = make(Squares(4))
    list(loader)
    assert loader.state_dict()["_iterator_finished"] is True


def test_it_is_one_of_torchdata_s_loaders_and_stays_one() -> None:
    loader = make(Squares(4))
    assert isinstance(loader, stateful_dataloader.StatefulDataLoader)
    assert type(loader).__name__ == "DataLoaderShard"
    assert lists(skip_first_batches(loader, 1)) == [[2, 3]]
    skipping = SkipDataLoader(Squares(4), 1, use_stateful_dataloader=True, batch_size=2)
    assert lists(skipping) == [[2, 3]]
    assert skipping.state_dict()["_iterator_finished"] is True


def test_a_position_that_cannot_be_loaded_says_why() -> None:
    plain = prepare_data_loader(DataLoader(Squares(8), batch_size=2))
    for call in (plain.state_dict, lambda: plain.load_state_dict({})):
        with pytest.raises(AttributeError, match="has no state dict. Set .*use_stateful_dataloader=True"):
            call()
    loader = make(Squares(8))
    with pytest.raises(ValueError, match=r"keys \['a'\] is not the position of a data loader"):
        loader.load_state_dict({"a": 1})
    for _ in loader:
        position = loader.state_dict()
        break
    del position["_epoch_order"]  # as torchdata itself, or accelerate 1.15, has it
    other = make(Squares(8), num_workers=2)
    with pytest.raises(ValueError, match="0 workers read, and this data loader has num_workers=2"):
        other.load_state_dict(position)
    assert len(lists(make(Squares(8)))) == 4


@UNDER_COVERAGE
@pytest.mark.parametrize("workers", [(0, 2), (2, 0)])
def test_another_number_of_workers_continues_the_epoch(workers: tuple[int, int]) -> None:
    loader, rest = make(Squares(12), num_workers=workers[0]), []
    for step, batch in enumerate(loader):
        if step == 1:
            position = loader.state_dict()
        if step > 1:
            rest.append(batch.tolist())
    other = make(Squares(12), num_workers=workers[1])
    other.load_state_dict(position)
    assert lists(other) == rest
    assert len(lists(other)) == 6


@UNDER_COVERAGE
def test_after_an_epoch_another_number_of_workers_reads_the_next_one() -> None:
    loader = make(Numbers(8))
    list(loader)
    other = make(Numbers(8), num_workers=1)
    other.load_state_dict(loader.state_dict())
    assert lists(other) == [[0, 1], [2, 3], [4, 5], [6, 7]]
