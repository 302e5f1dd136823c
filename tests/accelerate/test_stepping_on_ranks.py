"""Accumulation and training on several processes: what is exchanged when, and that the result is one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from accel_state.settings.accumulation import GradientAccumulationPlugin
from accelerate import Accelerator, DataLoaderConfiguration
from tests.support.ranks import ranks


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make_data(samples: int = 16) -> torch.Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(2))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch[:, :3]) - batch[:, 3:]).square().mean()


def differs_between_ranks(tensor: torch.Tensor) -> bool:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    return any(not torch.equal(copies[0], copy) for copy in copies[1:])


@ranks(2)
def test_gradients_are_exchanged_where_a_window_ends(rank: int, world: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    data = make_data().chunk(8)
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, data[2 * step + rank]))
        gradient = model.module[0].weight.grad
        assert differs_between_ranks(gradient) is (step % 2 == 0)
        if accelerator.sync_gradients:
            model.zero_grad()


@ranks(2)
def test_sync_each_batch_exchanges_always(rank: int, world: int) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(make_model())
    for batch in make_data().chunk(8)[rank::2]:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
        assert not differs_between_ranks(model.module[0].weight.grad)


@ranks(2)
def test_several_models_accumulate_together(rank: int, world: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = accelerator.prepare(make_model(), make_model())
    batch = make_data().chunk(2)[rank]
    for exchanged in (False, True):
        with accelerator.accumulate(first, second):
            accelerator.backward(loss_of(first, batch) + loss_of(second, batch))
        for model in (first, second):
            assert differs_between_ranks(model.module[0].weight.grad) is not exchanged


@ranks(2)
def test_sync_can_be_triggered_in_backward(rank: int, world: int) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    batch = make_data().chunk(2)[rank]
    with accelerator.no_sync(model):
        losses = [loss_of(model, part) for part in batch.chunk(2)]
    accelerator.backward(losses[0])
    assert differs_between_ranks(model.module[0].weight.grad)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    assert not differs_between_ranks(model.module[0].weight.grad)
    with accelerator.no_sync(model):  # only that one backward was concerned
        accelerator.backward(loss_of(model, batch))
    assert differs_between_ranks(model.module[0].weight.grad)


@ranks(2)
def test_processes_may_have_different_numbers_of_batches(rank: int, world: int) -> None:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(make_model(), DataLoader(make_data(6), batch_size=2))
    seen = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            seen += 1
    assert seen == (2 if rank == 0 else 1)
    assert accelerator.even_batches
    assert len(loader) == 2


@ranks(2)
def test_a_trigger_on_one_process_is_seen_by_all(rank: int, world: int) -> None:
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    if rank == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


# ---- parity -------------------------------------------------------------------------------------------------------------


def train(
    accelerator: Accelerator, data: torch.Tensor, batch_size: int, *, clip: bool = True
) -> dict[str, torch.Tensor]:
    """Three epochs with momentum, a scheduler and clipping."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader: Any = DataLoader(data, batch_size=batch_size)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in accelerator.get_state_dict(model).items()}


def by_hand(data: torch.Tensor, batch_size: int) -> dict[str, torch.Tensor]:
    """The same without any library, on batches of the global size."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for _ in range(3):
        for batch in data.split(batch_size):
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model.state_dict()


def settings(steps: int) -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": steps,
        "dataloader_config": DataLoaderConfiguration(split_batches=True),
        "step_scheduler_with_optimizer": True,
    }


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_one_process_equals_the_loop_by_hand(steps: int) -> None:
    got = train(Accelerator(cpu=True, **settings(steps)), make_data(32), 8 // steps)
    torch.testing.assert_close(got, dict(by_hand(make_data(32), 8)))


@ranks(2, 4)
@pytest.mark.parametrize("steps", [1, 2])
def test_several_processes_equal_the_loop_by_hand(rank: int, world: int, steps: int) -> None:
    got = train(Accelerator(**settings(steps)), make_data(32), 8 // steps)
    torch.testing.assert_close(got, dict(by_hand(make_data(32), 8)))


@ranks(2)
def test_schedules_count_the_batches_that_the_program_has_counted(rank: int, world: int) -> None:
    for settings, decays in ({}, 2), ({"already_sharded": True}, 1), ({"split_batches": True}, 1):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**settings))
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        accelerator.backward(model(torch.randn(2, 3)).sum())
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [0.5**decays]
