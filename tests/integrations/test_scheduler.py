"""The prepared scheduler keeps pace with the data, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR, ReduceLROnPlateau

from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_state.gradient_state import GradientState
from tests.integrations.training import new_engine, new_model, prepare
from tests.support.ranks import ranks


def decaying(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))


def new_schedule(make: Callable[[Any], Any] = decaying, **options: Any) -> tuple[Any, AcceleratedScheduler]:
    engine = new_engine(**options)
    model = new_model()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    _, optimizer = prepare(engine, model, plain)
    return optimizer, engine.prepare_scheduler(make(plain))


def test_it_steps_once_in_one_process() -> None:
    optimizer, scheduler = new_schedule()
    for expected in (1 / 2, 1 / 3):
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [pytest.approx(expected)]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 3)


@ranks(2, 4)
def test_each_processs_batch_counts(rank: int, world: int) -> None:
    optimizer, scheduler = new_schedule()
    for steps in (1, 2):
        optimizer.step()
        scheduler.step()
        assert scheduler.scheduler.last_epoch == steps * world


@ranks(2)
def test_split_batches_count_once_and_a_schedule_of_fixed_length_stays_at_its_end(rank: int) -> None:
    optimizer, scheduler = new_schedule(split_batches=True)
    optimizer.step()
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 1
    optimizer, scheduler = new_schedule(partial(OneCycleLR, max_lr=1.0, total_steps=5))
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert scheduler.scheduler.last_epoch == 5


def test_it_waits_for_the_end_of_a_window_and_steps_once_there() -> None:
    optimizer, scheduler = new_schedule()
    state = GradientState()
    for step in range(6):
        state._set_sync_gradients(step % 3 == 2)
        optimizer.step()
        scheduler.step()
    assert scheduler.scheduler.last_epoch == 2
    assert scheduler.scheduler._step_count == 3  # micro-batches leave no trace: `total_steps` counts this


def test_it_does_not_step_when_the_optimizer_was_skipped_unless_it_steps_by_itself() -> None:
    optimizer, scheduler = new_schedule()
    optimizer._is_overflow = True
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 0
    optimizer, scheduler = new_schedule(step_scheduler_with_optimizer=False)
    optimizer.step()
    optimizer._is_overflow = True
    GradientState()._set_sync_gradients(False)
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 1


def test_it_is_tied_to_the_optimizer_it_drives() -> None:
    engine = new_engine()
    plain = []
    for seed in range(2):
        model = new_model(seed)
        plain.append(torch.optim.SGD(model.parameters(), lr=1.0))
        prepare(engine, model, plain[-1])
    prepared = engine.context.prepared.optimizers
    scheduler = engine.prepare_scheduler(LambdaLR(plain[1], lambda epoch: 1.0))
    assert list(scheduler.optimizers) == [prepared[1]]
    stranger = torch.optim.SGD(new_model().parameters(), lr=1.0)
    assert list(engine.prepare_scheduler(LambdaLR(stranger, lambda epoch: 1.0)).optimizers) == prepared


def test_it_stands_alone_and_can_be_stored() -> None:
    new_engine()
    plain = torch.optim.SGD(new_model().parameters(), lr=1.0)
    scheduler = AcceleratedScheduler(decaying(plain), plain, step_with_optimizer=False)
    plain.step()
    scheduler.step()
    with pytest.warns(UserWarning, match="get_last_lr"):  # torch's own advice
        assert scheduler.get_lr() == [0.5]
    other = AcceleratedScheduler(decaying(plain), [plain])
    other.load_state_dict(scheduler.state_dict())
    assert other.scheduler.last_epoch == 1
    with pytest.raises(AttributeError):
        scheduler.print_lr()  # torch has none any more


@ranks(1, 2)
def test_a_metric_counts_once_whatever_the_number_of_ranks(rank: int, world: int) -> None:
    optimizer, scheduler = new_schedule(partial(ReduceLROnPlateau, patience=1, factor=0.5))
    rates = []
    for metric in (1.0, 2.0, 2.0, 2.0, 2.0):
        optimizer.step()
        scheduler.step(metric)
        rates += scheduler.get_last_lr()
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_the_metric_of_an_epoch_counts_although_its_last_window_is_open() -> None:
    optimizer, scheduler = new_schedule(partial(ReduceLROnPlateau, patience=0, factor=0.5))
    GradientState()._set_sync_gradients(False)
    for metric in (1.0, 2.0):
        scheduler.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.5


@ranks(2)
def test_an_epoch_given_by_number_is_set_once(rank: int) -> None:
    _, scheduler = new_schedule(partial(CosineAnnealingWarmRestarts, T_0=4))
    scheduler.step(1.5)
    assert scheduler.scheduler.last_epoch == 1
    assert scheduler.scheduler.T_cur == 1.5
