"""The real LOMO, which updates parameters while backward runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate import Accelerator

lomo_optim = pytest.importorskip("lomo_optim")  # AdaLomo of the same library asks for CUDA wherever it runs


@pytest.mark.parametrize("num_steps", [1, 2])
def test_lomo_trains_as_plain_gradient_descent(num_steps: int) -> None:
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(4, 1), torch.randn(32, 4), torch.randn(32, 1)
    by_hand = nn.Linear(4, 1)
    by_hand.load_state_dict(model.state_dict())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model, optimizer = accelerator.prepare(model, lomo_optim.Lomo(model, lr=0.1, clip_grad_value=100.0))
    assert accelerator.has_lomo_optimizer
    for index in range(20):
        batch = slice(index % 4 * 8, index % 4 * 8 + 8)
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs[batch]), targets[batch]), learning_rate=0.1)
            optimizer.step()
            optimizer.zero_grad()
        by_hand.zero_grad()
        (nn.functional.mse_loss(by_hand(inputs[batch]), targets[batch]) / num_steps).backward()
        with torch.no_grad():
            for parameter in by_hand.parameters():
                parameter -= 0.1 * parameter.grad
    for ours, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
