"""After `load_state` an epoch is read whole and in the same order; `skip_first_batches` and a switch continue it."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_ops.files.serialization import load
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object, set_seed
from tests.support.ranks import POOL

NUM_SAMPLES = 40
BATCH = 4
SAVED_AFTER = 3


class Training:
    """A model, and a loader whose batches are read in the same order by every instance.

    Args:
        continues: Whether loaders continue an epoch by themselves.
    """

    def __init__(
        self,
        folder: Path,
        data: Any = range(NUM_SAMPLES),
        seed: int = 1,
        batch: int = BATCH,
        workers: int = 0,
        continues: bool = True,
    ) -> None:
        self.folder = folder / "state"
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=continues)
        )
        set_seed(seed)
        plain: Any = DataLoader(data, batch, shuffle=not isinstance(data, IterableDataset), num_workers=workers)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, plain)

    def step(self, batch: torch.Tensor) -> list[int]:
        """Train on a batch; returns its samples."""
        self.accelerator.backward(self.model(batch.float().unsqueeze(1)).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        numbers: list[int] = batch.tolist()
        return numbers

    def save_within_epoch(self) -> list[list[int]]:
        """Train for an epoch, and save within it; returns the batches that come after."""
        rest = []
        for index, batch in enumerate(self.loader):
            numbers = self.step(batch)
            if index + 1 == SAVED_AFTER:
                self.accelerator.save_state(self.folder)
            if index >= SAVED_AFTER:
                rest.append(numbers)
        return rest

    def loaded(self) -> Training:
        """This one, after `load_state`."""
        self.accelerator.load_state(self.folder)
        return self


@pytest.fixture(autouse=True)
def torchdata(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchdata, unless a test asks for it."""
    if request.node.get_closest_marker("torchdata") is None:
        monkeypatch.setattr("accel_data.adapter.is_torchdata_stateful_dataloader_available", lambda: False)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    """A folder with a state saved within an epoch, and the batches of that epoch that came after."""
    return tmp_path, Training(tmp_path).save_within_epoch()


def test_the_switch_continues_with_the_rest_then_whole_epochs(saved: tuple[Path, list[list[int]]]) -> None:
    run = Training(saved[0], seed=2).loaded()
    assert len(run.loader) == NUM_SAMPLES // BATCH
    assert [run.step(batch) for batch in run.loader] == saved[1]
    assert len([run.step(batch) for batch in run.loader]) == NUM_SAMPLES // BATCH
    assert run.loader.iteration == 2


@pytest.mark.parametrize("continues", [False, True])
def test_skip_first_batches_skips_once(continues: bool, saved: tuple[Path, list[list[int]]]) -> None:
    run = Training(saved[0], seed=2, continues=continues).loaded()
    rest = run.accelerator.skip_first_batches(run.loader, SAVED_AFTER)
    assert [run.step(batch) for batch in rest] == saved[1]
    assert len([run.step(batch) for batch in run.loader]) == NUM_SAMPLES // BATCH
    assert run.loader.iteration == 2
    run = Training(saved[0], seed=2, continues=continues).loaded()
    whole = run.accelerator.skip_first_batches(run.loader, 0)
    assert len([run.step(batch) for batch in whole]) == NUM_SAMPLES // BATCH


def test_without_the_switch_the_epoch_is_whole_in_the_same_order(saved: tuple[Path, list[list[int]]]) -> None:
    run = Training(saved[0], seed=2, continues=False).loaded()
    with pytest.warns(UserWarning, match="saved after 3 batches of an epoch") as told:
        epoch = [run.step(batch) for batch in run.loader]
    assert "skip_first_batches(loader, 3)" in str(told[0].message)
    assert "DataLoaderConfiguration(use_stateful_dataloader=True)" in str(told[0].message)
    assert epoch[SAVED_AFTER:] == saved[1]
    assert sorted(itertools.chain(*epoch)) == list(range(NUM_SAMPLES))
    assert len([run.step(batch) for batch in run.loader]) == NUM_SAMPLES // BATCH  # and nothing is said again
    assert run.loader.iteration == 2


@pytest.mark.filterwarnings("ignore:The checkpoint was saved after")
@pytest.mark.parametrize("left", [2, 3, 8])
def test_a_loop_that_skips_by_hand_gets_the_batches_it_counts_on(left: int, tmp_path: Path) -> None:
    whole = Training(tmp_path, continues=False)
    order = []
    for index, batch in enumerate(whole.loader):
        order.append(whole.step(batch))
        if index + 1 == left:
            whole.accelerator.save_state(whole.folder)
    run = Training(tmp_path, seed=2, continues=False).loaded()
    seen = []
    for step, batch in enumerate(run.loader):
        if step < left:  # as programs for accelerate 1.15 do
            continue
        seen.append((run.step(batch), run.accelerator.gradient_state.end_of_dataloader))
    assert [numbers for numbers, _ in seen] == order[left:]
    assert [is_last for _, is_last in seen] == [False] * (len(seen) - 1) + [True]


@pytest.mark.parametrize("continues", [False, True])
def test_a_loop_that_drops_batches_without_a_forward_pass(
    continues: bool, saved: tuple[Path, list[list[int]]]
) -> None:
    run = Training(saved[0], seed=2, continues=continues).loaded()
    loader = run.loader if continues else run.accelerator.skip_first_batches(run.loader, SAVED_AFTER)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        if number in (0, 1, 2, 5):  # too long
            del batch
            continue
        run.step(batch)
    assert seen == saved[1]


class LateNoise(torch.utils.data.Dataset[torch.Tensor]):
    """Draws numpy's numbers from the fourth sample that is read on."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        noise = np.random.rand() if self.count > 4 else 0.0
        return torch.tensor([float(index), noise], dtype=torch.float64)


class LateNoiseStream(IterableDataset[torch.Tensor]):
    """The same, without indices."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        data = LateNoise()
        return (data[index] for index in range(NUM_SAMPLES))


@pytest.mark.parametrize("data", [LateNoise, LateNoiseStream])
@pytest.mark.parametrize("continues", [False, True])
def test_numbers_that_reading_draws_late(data: type, continues: bool, tmp_path: Path) -> None:
    run = Training(tmp_path, data(), batch=1, continues=continues)
    rest = []
    for step, batch in enumerate(run.loader):
        if step >= 6:
            rest.append(batch.tolist())
        np.random.rand()  # as the program itself may
        if step + 1 == 6:
            run.accelerator.save_state(run.folder)
    resumed_data = data()
    resumed_data.count = NUM_SAMPLES
    run = Training(tmp_path, resumed_data, seed=2, batch=1, continues=continues).loaded()
    loader = run.loader if continues else run.accelerator.skip_first_batches(run.loader, 6)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        np.random.rand()
    assert seen == rest


def test_a_program_that_reads_ahead(saved: tuple[Path, list[list[int]]]) -> None:
    run = Training(saved[0], seed=2).loaded()
    batches, seen = iter(run.loader), []
    while window := list(itertools.islice(batches, 4)):  # as Trainer does for an accumulation window
        seen += [run.step(batch) for batch in window]
    assert seen == saved[1]


def test_a_dataset_is_read_when_a_program_asks_for_it() -> None:
    data = LateNoise()
    loader = Accelerator(cpu=True).prepare(DataLoader(data, BATCH))
    assert [data.count for _ in loader] == list(range(BATCH, NUM_SAMPLES + 1, BATCH))


@pytest.mark.torchdata
@pytest.mark.parametrize("saves", [False, True])
def test_the_switch_reads_states_saved_without_it_and_the_other_way_round(saves: bool, tmp_path: Path) -> None:
    rest = Training(tmp_path, continues=saves).save_within_epoch()
    run = Training(tmp_path, seed=2, continues=not saves).loaded()
    loader = run.accelerator.skip_first_batches(run.loader, SAVED_AFTER) if saves else run.loader
    seen = []
    for batch in loader:
        seen.append(run.step(batch))
        if len(seen) == 2:
            run.accelerator.save_state(tmp_path / "again")
    assert seen == rest
    run = Training(tmp_path, seed=3, continues=True)
    run.accelerator.load_state(tmp_path / "again")
    assert [run.step(batch) for batch in run.loader] == rest[2:]


def test_a_loader_without_torchdata_has_a_state_dict() -> None:
    def prepared() -> Any:
        configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        return accelerator.prepare(DataLoader(range(NUM_SAMPLES), BATCH, shuffle=True))

    loader, rest, state = prepared(), [], None
    for step, batch in enumerate(loader):
        if step >= SAVED_AFTER:
            rest.append(batch.tolist())
        if step + 1 == SAVED_AFTER:
            state = pickle.loads(pickle.dumps(loader.state_dict()))
    torch.manual_seed(7)
    again = prepared()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    with pytest.raises(ValueError, match="_num_yielded.*without torchdata.*Install torchdata"):
        again.load_state_dict({"_num_yielded": 3})


def test_other_data_begin_at_their_start(saved: tuple[Path, list[list[int]]]) -> None:
    run = Training(saved[0], data=range(NUM_SAMPLES + 4), seed=2).loaded()
    with pytest.warns(UserWarning, match="epoch of 40 samples, and this data loader has 44"):
        seen = [number for batch in run.loader for number in run.step(batch)]
    assert sorted(seen) == list(range(NUM_SAMPLES + 4))


class SharedOut(IterableDataset[int]):
    """A stream whose workers read every so-many-th sample, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, NUM_SAMPLES, worker.num_workers) if worker else range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("workers", "batch", "is_told"),
    [((2, 0), BATCH, True), ((0, 2), BATCH, True), ((2, 2), 6, True), ((1, 0), 6, False), ((2, 2), BATCH, False)],
)
def test_a_stream_that_workers_share_out_otherwise_is_told_of(
    workers: tuple[int, int], batch: int, is_told: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    before, now = workers
    rest = Training(tmp_path, SharedOut(), workers=before).save_within_epoch()
    run = Training(tmp_path, SharedOut(), batch=batch, workers=now).loaded()
    seen = [run.step(batch) for batch in run.loader]
    assert (list(itertools.chain(*seen)) != list(itertools.chain(*rest))) is is_told
    told = [str(one.message) for one in recwarn if "num_workers" in str(one.message)]
    assert len(told) == is_told
    if is_told:
        assert (
            f"num_workers={before} and {BATCH} samples per batch, and this data loader has num_workers={now}"
            in told[0]
        )


def test_a_loop_that_was_left_is_not_continued(tmp_path: Path) -> None:
    run = Training(tmp_path)
    for batch in run.loader:
        run.step(batch)
        break
    run.accelerator.save_state(run.folder)  # the run that goes on begins an epoch, too
    again = Training(tmp_path, seed=2).loaded()
    assert len([again.step(batch) for batch in again.loader]) == NUM_SAMPLES // BATCH


def test_another_epoch_is_read_from_its_start(saved: tuple[Path, list[list[int]]]) -> None:
    run = Training(saved[0], seed=2).loaded()
    run.loader.set_epoch(5)
    assert len([run.step(batch) for batch in run.loader]) == NUM_SAMPLES // BATCH


def test_a_global_batch_that_does_not_fit_repeats_and_loses_nothing(saved: tuple[Path, list[list[int]]]) -> None:
    run = Training(saved[0], seed=2, batch=5).loaded()
    with pytest.warns(UserWarning, match="after 12 samples of an epoch.*the last 2 of them come again"):
        seen = [number for batch in run.loader for number in run.step(batch)]
    assert seen[2:] == [number for batch in saved[1] for number in batch]


def test_a_loader_that_waits_to_continue_can_be_pickled(saved: tuple[Path, list[list[int]]]) -> None:
    run = Training(saved[0], seed=2).loaded()
    copied = pickle.loads(pickle.dumps(run.loader))
    assert len(pickle.dumps(copied)) < 100_000
    assert [batch.tolist() for batch in copied] == saved[1]


def test_a_damaged_position_changes_nothing(saved: tuple[Path, list[list[int]]]) -> None:
    file = saved[0] / "state" / "sampler.bin"
    state = load(file)
    state["position"]["batches"] = -1
    torch.save(state, file)
    (saved[0] / "state" / "manifest.json").unlink()
    run = Training(saved[0], seed=2)
    weight = run.model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"sampler\.bin is damaged: .*is not the position"):
        run.loaded()
    assert torch.equal(run.model.weight, weight)
    assert run.loader.iteration == 0


STEPS = 2


def read_elastically(world: int, folder: str, begins: bool, ends: bool, dispatch: bool, seed: int) -> None:
    """Some steps of an epoch at a global batch of 12, between two checkpoints."""
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=True)
    )
    set_seed(seed)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(range(96), 12 // world, shuffle=True))
    if not begins:
        accelerator.load_state(folder)
    seen = []
    for index, batch in enumerate(loader):
        accelerator.backward(model(batch.float().unsqueeze(1) / 96).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(gather_object(batch.tolist()))
        if index + 1 == STEPS and not ends:
            accelerator.save_state(folder)
            break
    if accelerator.is_main_process:
        weights = [parameter.item() for parameter in model.parameters()]
        Path(folder, f"{seed}.json").write_text(json.dumps({"batches": seen, "weights": weights}))


read_elastically.body = read_elastically  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:The checkpoint .* was saved with num_processes")
@pytest.mark.sample(2)
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("changing", [(2, 1, 3, 2), (4, 2, 3, 1)])
def test_the_number_of_processes_changes_and_the_global_order_does_not(
    changing: tuple[int, ...], dispatch: bool, tmp_path: Path
) -> None:
    orders, weights = [], []
    for worlds in (changing, (changing[0],) * 4):
        folder = tmp_path / str(worlds[1])
        folder.mkdir()
        seen: list[list[int]] = []
        for index, world in enumerate(worlds):
            values = {
                "folder": str(folder),
                "begins": index == 0,
                "ends": index == 3,
                "dispatch": dispatch,
                "seed": 1 + index,
            }
            POOL.run(read_elastically, world, values, 60)
            run = json.loads((folder / f"{1 + index}.json").read_text())
            seen += run["batches"]
        orders.append(seen)
        weights.append(run["weights"])
    assert orders[0] == orders[1]
    assert weights[0] == pytest.approx(weights[1], rel=1e-6, abs=1e-6)
    assert sorted(sum(orders[0], [])) == list(range(96))


def skip_by_hand(rank: int, folder: str, dispatch: bool) -> None:
    """A run that is saved within its epoch, and one that loads it and drops batches itself."""
    orders: list[list[list[int]]] = []
    for seed in (1, 2):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        set_seed(seed)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(range(42), 2, shuffle=True))
        if seed == 2:
            accelerator.load_state(folder)
        seen = []
        for step, batch in enumerate(loader):
            if seed == 2 and step < SAVED_AFTER:
                continue
            accelerator.backward(model(batch.float().unsqueeze(1) / 42).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step >= SAVED_AFTER:
                seen.append(batch.tolist())
            elif step + 1 == SAVED_AFTER:
                accelerator.save_state(folder)
        orders.append(seen)
    Path(folder, f"order_{rank}.json").write_text(json.dumps(orders))


skip_by_hand.body = skip_by_hand  # type: ignore[attr-defined]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dispatch", [False, True])
def test_skipping_by_hand_on_two_ranks(dispatch: bool, tmp_path: Path) -> None:
    POOL.run(skip_by_hand, 2, {"folder": str(tmp_path), "dispatch": dispatch}, 60)
    for rank in range(2):
        whole, resumed = json.loads((tmp_path / f"order_{rank}.json").read_text())
        assert len(whole) == 11 - SAVED_AFTER
        assert resumed == whole


def test_a_state_saved_again_before_the_epoch_continues_has_its_position(saved: tuple[Path, list[list[int]]]) -> None:
    folder, rest = saved
    run = Training(folder, seed=2).loaded()
    run.accelerator.save_state(folder / "again")
    run = Training(folder, seed=3)
    run.accelerator.load_state(folder / "again")
    assert [run.step(batch) for batch in run.loader] == rest
