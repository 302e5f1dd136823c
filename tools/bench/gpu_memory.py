"""GPU memory of a bf16 training step: its peak over the same step by hand and over its rehearsal, and what `free_memory` leaves.

Everything is counted beyond what was allocated before. One round by hand comes first and counts for nothing: it allocates
what CUDA libraries keep for the rest of the process.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from tools.bench.gpu_measure import Figure, Scale, fresh_accelerator
from tools.bench.gpu_models import llama, num_bytes_of, tokens

STEPS = 3


def memory_figures(scale: Scale) -> Iterator[Figure]:
    """The peak of a step and the rest after it, alone or in a group of one rank."""
    where = "a group of one rank" if "RANK" in os.environ else "one process"
    data = tokens_of(scale)

    def parts() -> tuple[Any, Any]:
        model = llama_of(scale)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def by_hand() -> None:
        model, optimizer = parts()

        def loss() -> torch.Tensor:
            with torch.autocast(scale.device, torch.bfloat16):
                return model(input_ids=data, labels=data).loss

        train(loss, torch.Tensor.backward, optimizer)

    def prepared() -> None:
        accelerator = fresh_accelerator(scale, mixed_precision="bf16")
        model, optimizer = accelerator.prepare(*parts())
        train(lambda: model(input_ids=data, labels=data).loss, accelerator.backward, optimizer)
        accelerator.free_memory(model, optimizer)

    by_hand()
    floor, _ = peak_and_rest(scale, by_hand)
    ours, rest = peak_and_rest(scale, prepared)
    size = num_bytes_of(parts()[0]) / 1e6
    what = f"peak memory of a bf16 step of a Llama of {size:.0f} MB in {where}; floor: by hand"
    result = ours / floor if floor else 1.0  # nothing is counted on a CPU
    yield Figure(f"peak {where}", what, "MB", ours / 1e6, floor / 1e6, result, 1.005)
    if scale.is_ours and "RANK" not in os.environ and can_rehearse():
        rehearsed = rehearsed_peak(scale)
        what = (
            f"peak memory of that step that `accelerate rehearse` computes, on a {size:.0f} MB Llama; floor: measured"
        )
        error = 100 * abs(rehearsed / ours - 1) if ours else 0.0
        yield Figure("rehearsed peak", what, "MB", rehearsed / 1e6, ours / 1e6, error, 5.0, "%")
    what = f"GPU memory left after `free_memory` in {where}"
    yield Figure(f"rest {where}", what, "MB", rest / 1e6, 0.0, rest / 1e6, 0.0, "MB")


def llama_of(scale: Scale) -> Any:
    """The model of these figures."""
    return llama(scale, 768, 2048, 12, heads=12)


def tokens_of(scale: Scale) -> torch.Tensor:
    """The batch of these figures."""
    return tokens(scale, 4, 1024)


def can_rehearse() -> bool:
    """Whether this torch runs collectives without values."""
    from accel_cli.rehearse.command import OLDEST_TORCH
    from accel_state.libraries import is_torch_version

    return is_torch_version(">=", OLDEST_TORCH)


def rehearsed_peak(scale: Scale) -> int:
    """The bytes at the peak of a step by `accelerate rehearse`."""
    program = os.path.join(os.path.dirname(__file__), "rehearsed_llama.py")
    settings = json.dumps(asdict(replace(scale, device="cpu")))
    words = [
        "rehearse",
        "--device",
        "h100",
        "--num_processes",
        "1",
        "--steps",
        str(STEPS),
        "--json",
        program,
        settings,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli.main", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    peak: int = json.loads(done.stdout)["peak_bytes"]
    return peak


def train(loss: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], Any], optimizer: Any) -> None:
    """A few steps."""
    for _ in range(STEPS):
        backward(loss())
        optimizer.step()
        optimizer.zero_grad()


def peak_and_rest(scale: Scale, work: Callable[[], None]) -> tuple[int, int]:
    """The bytes of GPU memory that work takes at its peak, and those that stay once its objects are gone."""
    gc.collect()
    if scale.device != "cuda":
        work()
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gc.collect()
    return peak, torch.cuda.memory_allocated() - before
