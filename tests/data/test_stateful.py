"""Loaders that store their position themselves, through torchdata."""

import pickle
import sys

import pytest
from torch.utils.data import DataLoader

from accel_data.adapter import DataLoaderAdapter
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


def test_without_torchdata_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_data.adapter.is_torchdata_stateful_dataloader_available", lambda: False)
    with pytest.raises(ImportError, match="torchdata"):
        DataLoaderAdapter(Squares(2), use_stateful_dataloader=True)
