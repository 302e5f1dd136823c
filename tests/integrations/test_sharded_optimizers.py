"""Optimizers that look at whole parameters, where each rank holds shards of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accelerate import Accelerator
from tests.support.ranks import ranks

STEPS = 4


class PerRow(torch.optim.Optimizer):
    """As one writes them by hand: each parameter takes a step of a length of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.add_(self.direction(weight, weight.grad), alpha=-group["lr"])

    def direction(self, weight: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm().clamp(min=1e-8)


class Signs(PerRow):
    """Its steps are those of every element by itself."""

    def direction(self, weight: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class Noisy(PerRow):
    """Its steps are random, so that there is nothing to compare."""

    def direction(self, weight: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(weight)


class Preconditioned(PerRow):
    """Multiplies gradients by the inverse root of their sum of squares: plain tensors of its own, as matrices."""

    def direction(self, weight: Any, gradient: torch.Tensor) -> torch.Tensor:
        rows = gradient.reshape(weight.shape[0], -1)
        squares = self.state[weight].setdefault("squares", 0.01 * torch.eye(len(rows)))
        values, vectors = torch.linalg.eigh(squares.add_(rows @ rows.T))
        return (vectors @ torch.diag(values.rsqrt()) @ vectors.T @ rows).reshape(weight.shape)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    model._tp_plan = {"0": "colwise", "2": "rowwise"}
    return model


def installed(library: str, name: str) -> list[Any]:
    """The optimizer of a library, if that is installed."""
    return [getattr(import_module(library), name)] if find_spec(library.partition(".")[0]) else []


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp1": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
    "flat": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=False)},
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}


@ranks(2)
@pytest.mark.parametrize("sharding", list(SETTINGS))
def test_optimizers_that_would_take_other_steps_are_refused(rank: int, world: int, sharding: str) -> None:
    """Most of them trained with other steps under FSDP 1, and failed within torch elsewhere."""
    accelerator = Accelerator(cpu=True, **SETTINGS[sharding]())
    refused: list[Any] = [torch.optim.Adafactor, Preconditioned]
    for factored in installed("transformers.optimization", "Adafactor"):
        refused.append(partial(factored, scale_parameter=True, relative_step=False))
    refused += [PerRow, torch.optim.LBFGS] if sharding in ("fsdp1", "flat") else []
    refused += [partial(torch.optim.LBFGS, line_search_fn="strong_wolfe")]
    where = "engine 'ddp'( with the mesh dimensions tp)?" if sharding == "tp" else "engine 'fsdp"
    for make in refused:
        model = new_model()
        optimizer = make(model.parameters(), lr=0.01)
        generator = torch.random.get_rng_state()
        name = type(optimizer).__name__
        with pytest.raises(
            ValueError, match=f"{name} cannot update shards of parameters, .*{where}.*AdamW, or .* with DDP"
        ):
            accelerator.prepare(model, optimizer)
        assert torch.equal(torch.random.get_rng_state(), generator)
        accelerator.free_memory()


@ranks(2)
def test_a_closure_is_called_as_often_on_every_rank(rank: int, world: int) -> None:
    """An optimizer that decides by the loss gets the mean of all ranks; the replicas of one with a line search diverged."""
    inputs = torch.randn(STEPS, 8, 8, generator=torch.Generator().manual_seed(3)).double()
    for line_search in (None, "strong_wolfe"):
        make = partial(torch.optim.LBFGS, max_iter=8, line_search_fn=line_search)
        plain = new_model().double()
        train(plain, make(plain.parameters()), inputs, torch.Tensor.backward)
        accelerator = Accelerator(cpu=True)
        model = new_model().double()
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        train(model, optimizer, inputs.chunk(2, dim=1)[rank], accelerator.backward)
        for weight, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, atol=1e-8, rtol=0)
        accelerator.free_memory()


@ranks(2)
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2", "tp"])
def test_others_train_as_in_one_process(rank: int, world: int, sharding: str) -> None:
    inputs = torch.randn(STEPS, 8, 8, generator=torch.Generator().manual_seed(3))
    makers: list[Any] = [torch.optim.AdamW, Signs, *installed("schedulefree", "AdamWScheduleFree")]
    makers += {
        "fsdp1": [torch.optim.Rprop],
        "fsdp2": [PerRow, partial(torch.optim.LBFGS, max_iter=2)],
        "tp": [PerRow],  # LBFGS too, with newer versions of torch
    }[sharding]
    accelerator = Accelerator(cpu=True, **SETTINGS[sharding]())
    for make in makers:
        plain = new_model()
        train(plain, make(plain.parameters(), lr=0.01), inputs, torch.Tensor.backward)
        model = new_model()
        model, optimizer = accelerator.prepare(model, make(model.parameters(), lr=0.01))
        train(model, optimizer, inputs if sharding == "tp" else inputs.chunk(2, dim=1)[rank], accelerator.backward)
        weights = accelerator.get_state_dict(model)
        if rank == 0:
            for name, weight in plain.state_dict().items():
                torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=0)
        accelerator.free_memory()
    model = new_model()
    accelerator.prepare(model, Noisy(model.parameters(), lr=0.01))  # cannot be compared


def train(model: Any, optimizer: Any, inputs: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
    if hasattr(optimizer, "train"):
        optimizer.train()
    for batch in inputs:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(batch), torch.ones(len(batch), 4, dtype=batch.dtype))
            backward(loss)
            return loss

        closure()
        optimizer.step(closure) if isinstance(
            getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS
        ) else optimizer.step()
