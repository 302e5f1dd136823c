"""Uses everything that the package adds, as a user's script would."""

from __future__ import annotations

import sys

import torch
from torch import nn

from accelerate import Accelerator
from outside.options import ToyOptions

folder = sys.argv[1]
accelerator = Accelerator(log_with="printing")
accelerator.init_trackers("run", {"lr": 0.1})
model = nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    outputs = model(torch.ones(2, 2, device=accelerator.device))
    accelerator.backward(outputs.sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": 1.0}, step=step)
accelerator.save_state(folder)
accelerator.load_state(folder)
accelerator.print("engine", accelerator.engine.name, accelerator.engine.num_steps)
accelerator.print("precision", accelerator.mixed_precision, next(model.parameters()).dtype, outputs.dtype)
accelerator.print("scale", accelerator.engine.precision.loaded["seen"].item())
accelerator.print("speed", ToyOptions().speed)
accelerator.end_training()
