"""What a GPU adds to the figures: weights that travel while it computes. Run by tools/gpu_check.sh.

A model of blocks of linear layers stays in part on the GPU, within a budget, and in part in main memory. The floor of a
forward pass is what it takes with all weights on the GPU, or what the travelling bytes take at the speed of copies from
page-locked memory, measured in the same process, whichever is longer.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.load import load_checkpoint_in_model
from accel_bigmodel.checkpoint.write import write_model_folder
from accel_bigmodel.device_map.plan import infer_auto_device_map
from accel_bigmodel.dispatch import cpu_offload, dispatch_model
from accel_bigmodel.empty import init_empty_weights

WIDTH, BLOCKS, PER_BLOCK = 8192, 40, 4  # 21 GB of bfloat16
COPY_BYTES = 1 << 30
REPEATS = 5
GPU = torch.device("cuda", 0)


class Block(nn.Module):
    """A few layers that stay together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PER_BLOCK)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them, each beside a shortcut."""
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * 0.01
        return x


def build() -> nn.Module:
    """The model, wherever the current device is."""
    return nn.Sequential(*[Block() for _ in range(BLOCKS)]).to(torch.bfloat16).requires_grad_(False)


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of several runs, with nothing left to do on the GPU."""
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function(*arguments)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def copy_speed() -> float:
    """Bytes per second from page-locked memory to the GPU."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, device=GPU)
    return COPY_BYTES / seconds(lambda: here.copy_(host, non_blocking=True))


def measure() -> list[dict[str, Any]]:
    """All figures, as one dictionary each."""
    speed = copy_speed()
    found: list[dict[str, Any]] = [{"what": "page-locked copy to the GPU", "GB/s": speed / 1e9}]
    with torch.device(GPU):
        resident = build()
    inputs = {batch: torch.randn(batch, WIDTH, dtype=torch.bfloat16, device=GPU) for batch in (1, 64)}
    with torch.no_grad():
        computing = {batch: seconds(resident, x) for batch, x in inputs.items()}
        expected = {batch: resident(x).cpu() for batch, x in inputs.items()}
    total = sum(parameter.nbytes for parameter in resident.parameters())
    model_in_memory = resident.to("cpu")
    del resident
    torch.cuda.empty_cache()
    for share in (0, 25, 50, 75):
        found += [
            {"budget": f"{share} %", **figures}
            for figures in measure_budget(
                copy.deepcopy(model_in_memory), share, total, speed, inputs, computing, expected
            )
        ]
    found.append(measure_loading(model_in_memory, total, speed))
    return found


def measure_budget(
    model: nn.Module,
    share: int,
    total: int,
    speed: float,
    inputs: dict[int, torch.Tensor],
    computing: dict[int, float],
    expected: dict[int, torch.Tensor],
) -> list[dict[str, Any]]:
    """Forward passes with a share of the weights' bytes as the budget of the GPU; 0 is everything in main memory."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = total * share // 100
    if share:
        limits = {0: budget, "cpu": 2 * total}
        device_map = infer_auto_device_map(model, limits, no_split_module_classes=["Block"])
        dispatch_model(model, device_map, force_hooks=True)
    else:
        cpu_offload(model, GPU)
    on_gpu = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_cuda)
    found = []
    with torch.no_grad():
        for batch, x in inputs.items():
            for _ in range(3):
                output = model(x)
            assert torch.equal(output.cpu(), expected[batch]), "another result than with all weights on the GPU"
            taken = seconds(model, x)
            floor = max(computing[batch], (total - on_gpu) / speed)
            peak = torch.cuda.max_memory_allocated()
            model.offload_report()  # type: ignore[operator]  # copies are timed from now on
            for _ in range(2):
                model(x)
            found.append(
                {
                    "batch": batch,
                    "ms": taken * 1e3,
                    "floor ms": floor * 1e3,
                    "ratio (<= 1.10)": taken / floor,
                    "memory over budget (<= 1.02)": peak / budget if budget else None,
                    "verdict": model.offload_report().verdict,  # type: ignore[operator]
                }
            )
    return found


def measure_loading(model: nn.Module, total: int, speed: float) -> dict[str, Any]:
    """A checkpoint in the page cache to the GPU, against the slower of reading and copying."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(model.state_dict(), Path(folder), "2GB")
        begin = time.perf_counter()
        for path in Path(folder).glob("*.safetensors"):
            path.read_bytes()
        reading = total / (time.perf_counter() - begin)
        with init_empty_weights():
            empty = build()
        taken = seconds(lambda: load_checkpoint_in_model(empty, folder, device_map={"": 0}))
    return {
        "what": "load to the GPU",
        "GB/s": total / taken / 1e9,
        "share of floor (>= 0.8)": total / taken / min(reading, speed),
    }


if __name__ == "__main__":
    for figures in measure():
        print(json.dumps(figures), flush=True)
