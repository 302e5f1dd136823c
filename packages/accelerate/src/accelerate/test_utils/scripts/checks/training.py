"""Training on all processes gives what one process gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.test_utils.scripts.checks.check import Process, checks, make_accelerator, need_data_parallelism

BATCH = 2  # of one process
STEPS = 4
MAX_NORM = 0.5


def make_model() -> nn.Sequential:
    """Make a small network, the same every time; the generators of the program stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with a memory of its own."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def make_data(count: int) -> TensorDataset:
    """Make points of a function that the network can learn."""
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, 0.3 * inputs.sum(1, keepdim=True))


def train_alone(batch: int, accumulation: int, clip: bool) -> dict[str, torch.Tensor]:
    """Train without any library, on batches of that size, and return the parameters."""
    model = make_model()
    optimizer = make_optimizer(model)
    loader = DataLoader(make_data(batch * STEPS * accumulation), batch_size=batch)
    for index, (inputs, targets) in enumerate(loader):
        (nn.functional.mse_loss(model(inputs), targets) / accumulation).backward()
        if (index + 1) % accumulation == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def train(
    accelerator: Accelerator, prepared: Any, *, clip: bool = False, skipped: int = 0, steps: int | None = None
) -> list[float]:
    """Train as a user's program does.

    Args:
        accelerator: The accelerator.
        prepared: The model, the optimizer and the loader that it gave.
        clip: Whether to clip gradients.
        skipped: How many batches of the epoch to leave out.
        steps: After how many to stop.

    Returns:
        The losses of this process.
    """
    model, optimizer, loader = prepared
    losses = []
    if skipped:
        loader = accelerator.skip_first_batches(loader, skipped)
    for index, (inputs, targets) in enumerate(loader):
        if index == steps:
            break
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_parity(process: Process, *, accumulation: int = 1, clip: bool = False) -> None:
    """Compare the parameters after training on all processes with those after training on the same data alone."""
    need_data_parallelism(process)
    accelerator = make_accelerator(mixed_precision="no", gradient_accumulation_steps=accumulation)
    model = make_model()
    loader = DataLoader(make_data(BATCH * process.world * STEPS * accumulation), batch_size=BATCH)
    prepared = accelerator.prepare(model, make_optimizer(model), loader)
    train(accelerator, prepared, clip=clip)
    state_dict = accelerator.get_state_dict(prepared[0])
    expected = train_alone(BATCH * process.world, accumulation, clip)
    if accelerator.is_main_process:  # the others may have nothing
        assert_same(state_dict, expected)


def assert_same(found: dict[str, Any], wanted: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    """Compare parameters by name.

    Raises:
        AssertionError: Naming the parameter.
    """
    assert found.keys() == wanted.keys(), f"parameters {sorted(found)} instead of {sorted(wanted)}"
    for name, value in wanted.items():
        near = torch.isclose(found[name].detach().float().cpu(), value.float().cpu(), rtol=tolerance, atol=tolerance)
        assert near.all(), f"parameter {name!r}: expected {value.tolist()}, got {found[name].tolist()}"


TRAINING = checks(
    "training equals one process",
    step_by_step=check_parity,
    gradient_accumulation=partial(check_parity, accumulation=2),
    gradient_clipping=partial(check_parity, clip=True),
)
