"""The GPU memory of a training step, by hand and prepared; each function is one task."""

from __future__ import annotations

import gc
from typing import Any

import torch

from accelerate import Accelerator
from tests.cuda_shapes.pretended_group import launch
from tests.cuda_shapes.recorder import Recorder, Report
from tests.cuda_shapes.rows import BATCH, build
from tests.support.tiny_transformer import LENGTH, VOCABULARY, shift, token_loss

STEPS = 3


def memory_of_a_step(how: str, folder: str) -> dict[str, int]:
    """The bytes at the peak of a bf16 step, and those that stay once everything was freed.

    Args:
        how: "by hand", "alone" or "one rank" of a launch.
    """
    if how == "one rank":
        launch(1, local_rank=0)
    with Recorder() as recorder:
        accelerator = None if how == "by hand" else Accelerator(mixed_precision="bf16")
        model: Any = build().to("cuda:0")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
        tokens = torch.arange(BATCH * LENGTH, device="cuda:0").view(BATCH, LENGTH) % VOCABULARY
        for _ in range(STEPS):
            with recorder.recording(Report()):
                if accelerator is None:
                    with torch.autocast("cuda", torch.bfloat16):
                        logits = model(tokens)
                    loss = token_loss(logits.float(), shift(tokens))
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                else:
                    loss = token_loss(model(tokens), shift(tokens))
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                logits = None
            peak = torch.cuda.max_memory_allocated()
        if accelerator is not None:
            model, optimizer = accelerator.free_memory(model, optimizer)
        del model, optimizer, tokens, loss
        gc.collect()
        return {"peak": peak, "remaining": torch.cuda.memory_allocated()}
