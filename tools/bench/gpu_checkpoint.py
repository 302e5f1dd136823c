"""Checkpoints of a training state on the GPU: over raw calls that write and read the same, and how long a loop is blocked."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.bench.gpu_measure import Figure, Scale, fresh_accelerator

ROUNDS = 3  # after one that counts for nothing: memory and files are made in it


class TrainingState:
    """A prepared model and its AdamW after one step; 0.8 GB in all."""

    def __init__(self, scale: Scale) -> None:
        width = scale.size(2048, 16)
        self.accelerator = fresh_accelerator(scale)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(scale.size(16, 2)))).to(scale.device)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """All that a checkpoint must hold."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.detach() for value in (*self.model.state_dict().values(), *moments)]


def checkpoint_figures(scale: Scale) -> Iterator[Figure]:
    """`save_state` and `load_state` over the same by hand, and saves in the background over a copy to pinned memory."""
    state = TrainingState(scale)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        yield from call_figures(scale, state, Path(name))
        yield blocking_figure(scale, state, Path(name))


def call_figures(scale: Scale, state: TrainingState, folder: Path) -> Iterator[Figure]:
    """How long a save and a load take; by hand and prepared by turns, the best of several counts."""
    target = str(folder / "state")
    sides: dict[str, dict[str, Callable[[], Any]]] = {
        "by hand": calls_by_hand(state, folder / "by-hand", scale.device),
        "prepared": {
            "save": lambda: state.accelerator.save_state(target),
            "load": lambda: state.accelerator.load_state(target),
        },
    }
    best: dict[tuple[str, str], float] = {}
    for number in range(ROUNDS + 1):
        for side, calls in sides.items():
            for path in folder.iterdir():
                shutil.rmtree(path)
            for action, work in calls.items():
                taken = scale.seconds(work)
                if number:
                    best[side, action] = min(best.get((side, action), taken), taken)
    size = sum(tensor.nbytes for tensor in state.tensors()) / 1e9
    for action, goal in (("save", 1.1), ("load", 1.3)):
        ours, floor = best["prepared", action], best["by hand", action]
        what = f"`{action}_state` of {size:.1f} GB on the GPU; floor: by hand, with fsync, without checksums"
        yield Figure(f"{action}_state", what, "ms", ours * 1e3, floor * 1e3, ours / floor, goal)


def calls_by_hand(state: TrainingState, folder: Path, device: str) -> dict[str, Callable[[], Any]]:
    """The same without a library."""
    from safetensors.torch import load_file, save_file

    model, optimizer = state.model, state.optimizer
    weights, moments = folder / "model.safetensors", folder / "optimizer.bin"

    def sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def save() -> None:
        folder.mkdir()
        save_file(model.state_dict(), weights, metadata={"format": "pt"})
        sync(weights)
        torch.save(optimizer.state_dict(), moments)
        sync(moments)
        sync(folder)

    def load() -> None:
        model.load_state_dict(load_file(weights, device=device))
        optimizer.load_state_dict(torch.load(moments, weights_only=True, map_location="cpu"))  # noqa: TID251

    return {"save": save, "load": load}


def blocking_figure(scale: Scale, state: TrainingState, folder: Path) -> Figure:
    """How long `save_state(async_save=True)` keeps the loop; accelerate 1.15 has none, so its `save_state` counts."""
    tensors = state.tensors()
    pinned = [torch.empty_like(one, device="cpu", pin_memory=scale.device == "cuda") for one in tensors]

    def copy() -> None:
        for target, source in zip(pinned, tensors, strict=True):
            target.copy_(source, non_blocking=True)

    options = {"async_save": True} if scale.is_ours else {}
    blocked = copied = float("inf")
    for number in range(ROUNDS + 1):
        target = str(folder / f"background-{number}")
        saves: list[Any] = []

        def save(target: str = target, saves: list[Any] = saves) -> None:
            saves.append(state.accelerator.save_state(target, **options))

        taken, copying = scale.seconds(save), scale.seconds(copy)
        if scale.is_ours:
            saves[0].result()
        shutil.rmtree(target)
        if number:
            blocked, copied = min(blocked, taken), min(copied, copying)
    size = sum(tensor.nbytes for tensor in tensors) / 1e9
    what = f"`save_state(async_save=True)` of {size:.1f} GB: until the loop continues (1.15: `save_state`)"
    what += "; floor: a copy to pinned memory"
    return Figure("async_save", what, "ms", blocked * 1e3, copied * 1e3, blocked / copied, 2.0)
