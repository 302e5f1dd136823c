"""The program of the row "rehearsed peak": the bf16 steps that `gpu_memory` measures, for `accelerate rehearse`.

The argument is a `Scale` as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from tools.bench.gpu_measure import Scale
from tools.bench.gpu_memory import STEPS, llama_of, tokens_of

if __name__ == "__main__":
    scale = Scale(**json.loads(sys.argv[1]))
    accelerator = Accelerator(mixed_precision="bf16")
    model = llama_of(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = tokens_of(scale)
    samples = [row for _ in range(STEPS + 1) for row in rows]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=len(rows)))
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
