"""What all programs here train: a model, its data, and how plain torch trains it on one device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import TensorDataset

NUM_SAMPLES, GLOBAL_BATCH, ACCUMULATION, EPOCHS = 42, 8, 2, 2  # 5 full batches and one of 2 samples
MAX_NORM, LEARNING_RATE = 0.5, 1e-2


def dataset(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1, keepdim=True) > 0).float())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(inputs))


class Net(nn.Module):
    """Two blocks, and a pair of layers with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.head(self.second(torch.tanh(self.first(hidden))))
        return output


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def batches() -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], bool]]:
    """The global batches of an epoch, the last one padded with the first samples, and whether it is the last."""
    inputs, targets = dataset().tensors
    order = [*range(NUM_SAMPLES), *range(-NUM_SAMPLES % GLOBAL_BATCH)]
    for start in range(0, len(order), GLOBAL_BATCH):
        chosen = order[start : start + GLOBAL_BATCH]
        yield (inputs[chosen], targets[chosen]), start + GLOBAL_BATCH == len(order)


def plain_losses(accumulation: int = ACCUMULATION) -> list[float]:
    """The loss of every micro-batch, by plain torch in one process on the CPU."""
    model = Net()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    losses = []
    for _ in range(EPOCHS):
        for index, ((inputs, targets), is_last) in enumerate(batches()):
            loss = loss_of(model, inputs, targets)
            losses.append(loss.item())
            (loss / accumulation).backward()
            if is_last or (index + 1) % accumulation == 0:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return losses
