"""The network of docs/examples/digits.py, without dropout, and its data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def make_network(seed: int = 0) -> nn.Module:
    """The same network for the same seed, for images of shape (batch, 1, 8, 8)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def digits_batches(steps: int, batch_size: int = 32) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of images and their digits, from the beginning."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    for step in range(steps):
        part = slice(step * batch_size, (step + 1) * batch_size)
        yield images[part], labels[part]
