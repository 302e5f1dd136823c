"""Checks that several models can be trained with DeepSpeed, each with settings of its own.

By itself: `accelerate launch --num_processes 2 .../external_deps/test_ds_multiple_model.py`. Needs DeepSpeed.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.test_utils.scripts.checks.check import Process, checks, make_accelerator, same
from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.test_utils.scripts.checks.sentences import LENGTH, WORDS, logits_of, make_loaders, make_reader
from accelerate.test_utils.scripts.external_deps.needs import need_deepspeed
from accelerate.utils import DeepSpeedPlugin, set_seed


class NoiseModel(nn.Module):
    """Adds a trained amount of noise to what a model says.

    Args:
        noise_factor: How much, to begin with.
    """

    def __init__(self, noise_factor: float = 0.1) -> None:
        super().__init__()
        self.noise_factor = nn.Parameter(torch.tensor([noise_factor]))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """(batch, 2) to the same."""
        noisy: torch.Tensor = logits + torch.rand_like(logits) * self.noise_factor
        return noisy


def make(process: Process) -> Accelerator:
    """An accelerator with two sets of settings: one to train with, one for a model that only answers."""
    need_deepspeed(process)
    plugins = {
        "student": DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1),
        "teacher": DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=1),
    }
    return make_accelerator(deepspeed_plugins=plugins)


def single_model_training(process: Process) -> None:
    """One model is trained with another one that is sharded and frozen."""
    accelerator = make(process)
    set_seed(0)
    loader, _ = make_loaders(trained=64)
    student = make_reader()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    accelerator.state.select_deepspeed_plugin("teacher")
    same(accelerator.state.deepspeed_plugin is accelerator.state.get_deepspeed_plugin("teacher"), True, "the plugin")
    teacher = accelerator.prepare(make_reader())
    accelerator.state.select_deepspeed_plugin("student")
    losses = []
    for batch in loader:
        with torch.no_grad():
            targets = logits_of(teacher, batch)
        loss = nn.functional.mse_loss(logits_of(student, batch), targets.roll(1, -1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], f"the loss did not decrease: {losses}"


def multiple_model_training(process: Process) -> None:
    """Two models are trained side by side, each by an accelerator of its own."""
    first = make(process)
    second = Accelerator()
    set_seed(0)
    loader, _ = make_loaders(trained=64)
    reader, noise = make_reader(), NoiseModel()
    reader_optimizer = torch.optim.AdamW(reader.parameters(), lr=0.02)
    noise_optimizer = torch.optim.AdamW(noise.parameters(), lr=0.02)
    reader, reader_optimizer, loader = first.prepare(reader, reader_optimizer, loader)
    first.state.select_deepspeed_plugin("teacher")
    noise, noise_optimizer, _ = second.prepare(noise, noise_optimizer, make_loaders(trained=64)[0])
    for batch in loader:
        logits = logits_of(reader, batch)
        first.backward(nn.functional.cross_entropy(logits, batch["labels"]))
        reader_optimizer.step()
        reader_optimizer.zero_grad()
        second.backward(noise(logits.detach()).square().mean())
        noise_optimizer.step()
        noise_optimizer.zero_grad()
    sentence = torch.zeros(1, LENGTH, dtype=torch.long, device=first.device) + WORDS - 1
    assert logits_of(reader, {"input_ids": sentence, "attention_mask": torch.ones_like(sentence)}).isfinite().all()


SEVERAL = checks("several models", one_trained=single_model_training, two_trained=multiple_model_training)


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(SEVERAL)


if __name__ == "__main__":
    sys.exit(main())
