"""A task that a model learns in seconds: does a sentence hold a certain word? Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator

WORDS, LENGTH, WANTED = 40, 8, 7
TRAINED, CHECKED = 512, 99  # sentences; the second number divides by nothing


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random words, always the same ones, half of the sentences with the wanted one.

    Args:
        count: How many sentences.
        seed: Of the words.
    """

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WANTED + 1, WORDS, (count, LENGTH), generator=generator)
        self.labels = torch.arange(count) % 2
        places = torch.randint(0, LENGTH, (count,), generator=generator)
        chosen = self.labels.bool()
        self.words[chosen, places[chosen]] = WANTED

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


class Reader(nn.Module):
    """The mean of the words' vectors, and what follows from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, words) to the logits of no and yes, (batch, 2)."""
        hidden: torch.Tensor = self.head(torch.tanh(self.hidden(self.embedding(input_ids).mean(1))))
        return hidden


def make_reader(folder: str | None = None, **settings: Any) -> nn.Module:
    """The model to train, the same every time.

    Args:
        folder: Of a model of transformers, to train that one instead; it must know 40 words.
        settings: For its `from_pretrained`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if folder is None:
            return Reader()
        from transformers import AutoModelForSequenceClassification

        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, **settings)
        return model


def make_loaders(
    batch_size: int = 16, trained: int = TRAINED, checked: int = CHECKED
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders to train and to check with.

    Args:
        batch_size: Sentences in a batch of one process.
        trained: Sentences to train with.
        checked: Sentences to check with.
    """
    training = DataLoader(Sentences(trained, seed=0), batch_size=batch_size, shuffle=True)
    return training, DataLoader(Sentences(checked, seed=1), batch_size=2 * batch_size)


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a model says about a batch, (batch, 2); models of transformers wrap it."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits.float()


def train_epoch(accelerator: Accelerator, model: nn.Module, optimizer: Any, scheduler: Any, loader: Any) -> None:
    """Go through the sentences once, as a user's program does."""
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(logits_of(model, batch), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@torch.no_grad()
def accuracy(accelerator: Accelerator, model: nn.Module, loader: Any) -> float:
    """Which part of all sentences, each counted once, the model is right about."""
    model.eval()
    right = torch.cat(
        [accelerator.gather_for_metrics(logits_of(model, batch).argmax(-1) == batch["labels"]) for batch in loader]
    )
    count = len(loader.dataset)
    assert len(right) == count, f"{len(right)} sentences were gathered instead of {count}"
    return right.float().mean().item()
