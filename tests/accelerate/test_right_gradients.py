"""Gradients that equal the big batch's, on any number of processes and for any split into batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.ddp import DistributedDataParallelKwargs
from accelerate import Accelerator
from tests.support.ranks import ranks

FEATURES = 3


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def make_documents(count: int) -> list[torch.Tensor]:
    """Documents of 1 to 9 items, each item `FEATURES` inputs and a target."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 10, (count,), generator=generator).tolist()
    return [torch.randn(length, FEATURES + 1, generator=generator, dtype=torch.float64) for length in lengths]


def loss_of(model: nn.Module, items: torch.Tensor) -> torch.Tensor:
    return (model(items[:, :FEATURES]) - items[:, FEATURES:]).square().mean()


def big_batch_step(items: torch.Tensor, max_norm: float = math.inf) -> dict[str, torch.Tensor]:
    """The parameters after one step of plain SGD on all items at once, in one process."""
    model = make_model()
    loss_of(model, items).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.state_dict()


def windowed_step(
    average_over: str, batches: list[torch.Tensor], max_norm: float | None = None, **arguments: Any
) -> dict[str, torch.Tensor]:
    """The parameters after one step over a window of `batches` on each process; the window could hold 8."""
    plugin = GradientAccumulationPlugin(num_steps=8, average_over=average_over)  # type: ignore[arg-type]
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, **arguments)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loader = accelerator.prepare(DataLoader(range(len(batches) * accelerator.num_processes), batch_size=1))
    for batch, _ in zip(batches, loader, strict=True):
        with accelerator.accumulate(model):
            weight = {"weight": len(batch)} if average_over == "weights" else {}
            accelerator.backward(loss_of(model, batch), **weight)
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return dict(accelerator.get_state_dict(model))


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.sample(6)
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("num_batches", [1, 3, 5])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_weighted_items_count_alike(rank: int, world: int, num_batches: int, max_norm: float | None) -> None:
    documents = make_documents(world * num_batches)
    got = windowed_step("weights", documents[rank::world], max_norm)
    assert_same(got, big_batch_step(torch.cat(documents), max_norm or math.inf))


@pytest.mark.sample(6)
@ranks(1, 2, 4)
@pytest.mark.parametrize("num_batches", [1, 3, 5])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_short_window_is_divided_by_its_real_length(
    rank: int, world: int, num_batches: int, max_norm: float | None
) -> None:
    items = torch.cat(make_documents(40))[: 2 * world * num_batches]
    batches = list(items.split(2))
    got = windowed_step("window", batches[rank::world], max_norm)
    assert_same(got, big_batch_step(items, max_norm or math.inf))


@ranks(1, 2)
def test_by_default_a_short_window_is_divided_by_the_number_of_steps(rank: int, world: int) -> None:
    items = torch.cat(make_documents(40))[: 2 * world * 2]
    got = windowed_step("steps", list(items.split(2))[rank::world])
    before, full = make_model().state_dict(), big_batch_step(items)
    for name, tensor in got.items():
        expected = before[name] + (full[name] - before[name]) * 2 / 8
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


@ranks(2)
def test_weights_survive_compressed_gradients(rank: int, world: int) -> None:
    documents = make_documents(6)
    handler = DistributedDataParallelKwargs(comm_hook="bf16")
    got = windowed_step("weights", documents[rank::world], kwargs_handlers=[handler])
    expected = big_batch_step(torch.cat(documents))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=2e-2)


@ranks(1, 2)
def test_weights_may_be_tensors_and_windows_follow_one_another(rank: int, world: int) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, average_over="weights")
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    documents = make_documents(6 * world)
    expected_model = make_model()
    by_hand = torch.optim.SGD(expected_model.parameters(), lr=0.1)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for window in range(3):
        mine = documents[window * 2 * world : (window + 1) * 2 * world]
        loss_of(expected_model, torch.cat(mine)).backward()
        by_hand.step()
        by_hand.zero_grad()
        for document in mine[rank::world]:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, document), weight=torch.tensor(len(document)))
                optimizer.step()
                optimizer.zero_grad()
    assert_same(dict(accelerator.get_state_dict(model)), dict(expected_model.state_dict()))


def test_weights_are_asked_for_where_they_are_needed() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, average_over="weights")
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(make_model())
    items = make_documents(1)[0]
    with pytest.raises(ValueError, match="weight"):
        accelerator.backward(loss_of(model, items))


def test_weights_are_refused_where_they_would_be_ignored() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    with pytest.raises(ValueError, match="average_over"):
        accelerator.backward(loss_of(model, make_documents(1)[0]), weight=3)
