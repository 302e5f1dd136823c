"""Memory stays where it is over many steps, and over many models that are prepared and freed."""

from __future__ import annotations

import pytest

from tests.hostile.running import last_line_of

MEGABYTE = 1 << 20
SCRIPT = """
import gc, json, psutil, torch
from torch import nn
from torch.utils.data import DataLoader
from accelerate import Accelerator

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
gc.freeze()  # each model that is freed has garbage collected: not by looking at all of torch


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def prepared(samples):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    return accelerator.prepare(model, optimizer, DataLoader(torch.randn(samples, 64), 8, shuffle=True))


def train(model, optimizer, loader, steps):
    done = 0
    while done < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            done += 1


def cycles(count):
    for _ in range(count):
        objects = prepared(32)
        train(*objects, 4)
        accelerator.free_memory(*objects)


cycles(50)
before = resident()
cycles(300)
grown = {"300 models": resident() - before}
objects = prepared(800)
train(*objects, 300)
before = resident()
train(*objects, 3000)
print(json.dumps({**grown, "3,000 steps": resident() - before}))
"""


@pytest.mark.thorough
def test_memory_does_not_grow() -> None:
    grown = last_line_of("-c", SCRIPT)
    assert {what: amount for what, amount in grown.items() if amount > MEGABYTE} == {}
