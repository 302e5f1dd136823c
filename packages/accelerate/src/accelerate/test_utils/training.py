"""Small models and data with known results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS, LENGTH = 1000, 32


class RegressionDataset:
    """Points near a line.

    Args:
        a: The slope.
        b: The intercept.
        length: How many points.
        seed: Of the points; a random one when None.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.length = length
        self.x = rng.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + rng.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    """A line.

    Args:
        a: The slope to begin with.
        b: The intercept to begin with.
        double_output (`bool`): Return the result twice.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.double_output = double_output
        self.first_batch = True

    def forward(self, x: torch.Tensor | None = None) -> Any:
        """The line at some places.

        Args:
            x: The places, any shape.
        """
        assert x is not None
        self.first_batch = False
        y = x * self.a + self.b
        return (y, y) if self.double_output else y


class _Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random words, always the same ones."""

    def __init__(self, count: int, with_labels: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
        self.labels = torch.randint(0, 2, (count,), generator=generator) if with_labels else self.words

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders to train and to validate a classifier of sentences with; nothing is downloaded.

    Args:
        accelerator: Taken for the sake of older programs, and not used.
        batch_size: Sentences in a batch to train with.
    """
    return _loaders(batch_size, with_labels=True)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Any, batch_size: int = 16
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders to train and to validate a language model with; nothing is downloaded.

    Args:
        accelerator: Taken for the sake of older programs, and not used.
        batch_size: Sentences in a batch to train with.
    """
    return _loaders(batch_size, with_labels=False)


def _loaders(batch_size: int, with_labels: bool) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train, check = _Sentences(64, with_labels, seed=0), _Sentences(16, with_labels, seed=1)
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(check, batch_size=2)
