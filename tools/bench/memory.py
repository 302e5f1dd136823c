"""Peak memory of a bf16 training step whose logits are large, over the same step written by hand.

The floors run the model under autocast. One converts the logits to float32, as a prepared model does; the other keeps them
in bfloat16 and computes the loss under autocast, which converts them for the loss alone. The caller holds the outputs until
the backward pass is over, as a loop that logs them does. All losses must be equal, bit for bit.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.row import Row
from tools.reference import run_json

TOKENS, WORDS, WIDTH = 2048, 32_000, 64
LOGITS_MB = TOKENS * WORDS * 2 / 1e6
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": "0"}
FLOORS = {
    "float32": "float32 outputs by hand",
    "bfloat16": "bfloat16 outputs by hand, loss under autocast",
}


def rows(reference: Path) -> list[Row]:
    """Measure ours, the reference and both floors, each in a process of its own."""
    mine, theirs = (run_json(python, __file__, "prepared", **GIVE_BACK) for python in (sys.executable, reference))
    found = []
    for kind, what in FLOORS.items():
        floor = run_json(sys.executable, __file__, kind, **GIVE_BACK)
        losses = {side["loss"] for side in (mine, theirs, floor)}
        assert len(losses) == 1, f"losses differ: {losses}"
        text = f"peak memory of a bf16 step with {LOGITS_MB:.0f} MB of logits; floor: {what}"
        found.append(Row(text, "MB", mine["peak"], theirs["peak"], floor["peak"], mine["peak"] / floor["peak"], 1.02))
    return found


def worker(kind: str) -> None:
    """Take two steps; print the loss, and how much memory the second one takes at its peak."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Linear(WIDTH, WORDS, bias=False)
    inputs, targets = torch.randn(TOKENS, WIDTH), torch.randint(0, WORDS, (TOKENS,))
    step = make_step(kind, model)
    step(inputs, targets)
    model.zero_grad()
    gc.collect()
    before = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    outputs, loss = step(inputs, targets)
    assert outputs.shape == (TOKENS, WORDS)
    print(json.dumps({"peak": status_mb("VmHWM") - before, "loss": loss.item()}))


def make_step(kind: str, model: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """One step, which returns the outputs and the loss."""
    import torch
    from torch.nn.functional import cross_entropy

    if kind == "prepared":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(model)

        def step(inputs: Any, targets: Any) -> tuple[Any, Any]:
            outputs = prepared(inputs)
            loss = cross_entropy(outputs, targets)
            accelerator.backward(loss)
            return outputs, loss

        return step

    def by_hand(inputs: Any, targets: Any) -> tuple[Any, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
            if kind == "float32":
                outputs = outputs.float()
            loss = cross_entropy(outputs, targets)
        loss.backward()
        return outputs, loss

    return by_hand


def status_mb(name: str) -> float:
    """A figure of this process's memory."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    worker(sys.argv[1])
