"""Tasks that show what the recorder sees: mistakes planted beside their harmless siblings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.cuda_shapes import pretended_group
from tests.cuda_shapes.recorder import Recorder, Report
from tests.support.tiny_transformer import make_model, shift, token_loss


def _host(pinned: bool) -> torch.Tensor:
    return torch.ones(8).pin_memory() if pinned else torch.ones(8)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.isnan().any()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "cpu": lambda x: x.cpu(),
    "to the device": lambda x: _host(False).to(x.device),
    "to the device, not pinned": lambda x: _host(False).to(x.device, non_blocking=True),
    "new tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "pinned": lambda x: _host(True).to(x.device, non_blocking=True),
    "masked fill": lambda x: x.masked_fill(x > 0, 1.0),
    "set by mask": lambda x: x.__setitem__(x > 0, 0.0),
    "filled": lambda x: torch.zeros(4, device=x.device) + x.sum(),
    "another gpu": lambda x: x.to("cuda:1"),
}


def waits_of_calls(folder: str) -> dict[str, int]:
    """How many waits each call is recorded with."""
    actual = {}
    with Recorder() as recorder:
        x = torch.ones(8, device="cuda:0")
        for name, call in CALLS.items():
            report = Report()
            with recorder.recording(report):
                call(x)
            actual[name] = len(report.waits)
    return actual


def mixed_devices(folder: str) -> str:
    """The error of an operation on tensors of two devices."""
    with Recorder():
        try:
            torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
        except RuntimeError as error:
            return str(error)
    return "none"


def collective_of_a_cpu_tensor(folder: str) -> str:
    """The error of a collective of a tensor that NCCL does not serve."""
    pretended_group.launch(8, 3)
    dist.init_process_group("nccl", rank=0, world_size=8)
    with Recorder():
        dist.all_reduce(torch.ones(2, device="cuda:3"))
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError as error:
            return str(error)
    return "none"


def losses(device: str, folder: str) -> list[float]:
    """Three steps of training; the same on any device."""
    with Recorder():
        torch.manual_seed(0)
        model = make_model().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = (torch.arange(64).view(4, 16) % 32).to(device)
        actual = []
        for _ in range(3):
            loss = token_loss(model(tokens), shift(tokens))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            actual.append(loss.item())
    return actual
