"""Local SGD: apart in between, equal where it averages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.engines.engine import Engine
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from tests.support.ranks import ranks


def of_all_ranks(tensor: torch.Tensor) -> list[float]:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    return [copy.item() for copy in copies]


@ranks(2)
def test_parameters_are_averaged_every_few_steps_and_at_the_end(rank: int, world: int) -> None:
    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    with LocalSGD(accelerator, wrapped, local_sgd_steps=2) as local_sgd:
        for _ in range(3):
            accelerator.backward(-(rank + 1.0) * wrapped(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            seen.append(of_all_ranks(model.weight.detach()))
    # each rank goes up by rank + 1 a step; the second step and the end average
    assert seen == [[1.0, 2.0], [3.0, 3.0], [4.0, 5.0]]
    assert of_all_ranks(model.weight.detach()) == [4.5, 4.5]
    accelerator.backward((rank + 1.0) * wrapped(torch.ones(1, 1)).sum())
    assert of_all_ranks(model.weight.grad) == [1.5, 1.5]  # exchanged again


@ranks(2)
def test_disabled_it_does_nothing(rank: int, world: int) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    with LocalSGD(accelerator, model, local_sgd_steps=1, enabled=False) as local_sgd:
        accelerator.backward((rank + 1.0) * model(torch.ones(1, 1)).sum())
        local_sgd.step()
    assert of_all_ranks(model.module.weight.grad) == [1.5, 1.5]


@ranks(2)
def test_an_error_on_one_process_does_not_wait_for_the_others(rank: int, world: int) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    if rank == 0:
        with pytest.raises(KeyError), LocalSGD(accelerator, model, local_sgd_steps=8):
            raise KeyError("mine")


def test_one_process_has_nothing_to_average() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    before = model.weight.detach().clone()
    with LocalSGD(accelerator, model, local_sgd_steps=1) as local_sgd:
        local_sgd.step()
    assert (local_sgd.num_steps, local_sgd.enabled) == (1, False)
    assert torch.equal(model.weight, before)


def test_the_number_of_steps_is_checked() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="local_sgd_steps=0"):
        LocalSGD(accelerator, nn.Linear(1, 1), local_sgd_steps=0)


@ranks(2)
def test_sharded_parameters_cannot_be_averaged(rank: int, world: int) -> None:
    accelerator = Accelerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(accelerator.engine), "allows_local_sgd", Engine.allows_local_sgd)
        with pytest.raises(ValueError, match="replica of the model"):
            LocalSGD(accelerator, nn.Linear(1, 1), local_sgd_steps=2)
