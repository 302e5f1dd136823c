"""Training on one GPU beside the same loop written by hand: what a step adds, waits, a pinned loader, a compiled Llama."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tools.bench.gpu_measure import Figure, Scale, by_turns, fresh_accelerator, median_and_spread, ratio
from tools.bench.gpu_models import llama, tokens

MAX_SHARE = 2.0  # percent of a step
SYNC_MESSAGE = "called a synchronizing CUDA operation"
COUNTED_STEPS = 10


def step_figures(scale: Scale) -> Iterator[Figure]:
    """What is added to a step of a model so small that only the host counts, as a share of the step.

    By hand runs twice, as two loops: what the second adds to the first is what this measurement cannot tell from nothing.
    """
    x = torch.randn(8, 16, device=scale.device)

    def stepper(prepared: tuple[Any, Any], backward: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
        model, optimizer = prepared

        def step() -> None:
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return step

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(scale.device)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    accelerator = fresh_accelerator(scale)
    sides = {
        "by hand": stepper(parts(), torch.Tensor.backward),
        "by hand, again": stepper(parts(), torch.Tensor.backward),
        "prepared": stepper(accelerator.prepare(*parts()), accelerator.backward),
    }
    times = by_turns(scale, sides, steps=scale.size(50, 5), rounds=scale.size(36, 6))
    floor, _ = median_and_spread(times["by hand"])
    titles = {"by hand, again": "by hand against itself: added to", "prepared": "added to"}
    for side, title in titles.items():
        differences = [mine - raw for mine, raw in zip(times[side], times["by hand"], strict=True)]
        added, spread = median_and_spread(differences)
        share = abs(added) / floor if side == "by hand, again" else added / floor
        what = f"{title} a step of {floor * 1e6:.0f} us, as a share of it"
        yield Figure(f"step {side}", what, "us", added * 1e6, 0.0, share * 100, MAX_SHARE, "%", spread * 1e6)


class TrainingStep:
    """A step in bf16 with everything that a program usually does in one.

    Args:
        scale: Where.
        accelerator: Prepares all of it; None for the same by hand.
    """

    def __init__(self, scale: Scale, accelerator: Any = None) -> None:
        self.device, self.accelerator = scale.device, accelerator
        width = scale.size(1024, 16)
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)).to(scale.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        batch = scale.size(256, 4)
        dataset = TensorDataset(torch.randn(COUNTED_STEPS * batch, width), torch.randn(COUNTED_STEPS * batch, 8))
        loader = DataLoader(dataset, batch_size=batch, pin_memory=scale.device == "cuda")
        prepared: tuple[Any, ...] = (model, optimizer, scheduler, loader)
        if accelerator is not None:
            prepared = accelerator.prepare(*prepared)
        self.model, self.optimizer, self.scheduler, self.loader = prepared

    def epoch(self) -> None:
        """Ten steps."""
        for inputs, targets in self.loader:
            if self.accelerator is None:
                self._by_hand(inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True))
            else:
                self._prepared(inputs, targets)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def _by_hand(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            outputs = self.model(inputs)
        nn.functional.mse_loss(outputs.float(), targets).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def _prepared(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        outputs = self.model(inputs)
        self.accelerator.backward(nn.functional.mse_loss(outputs, targets))
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.accelerator.gather_for_metrics((outputs.detach(), targets))


@contextmanager
def recorded_waits(scale: Scale) -> Iterator[list[str]]:
    """The operations that make the host wait for the GPU in the block, as torch's debug mode warns of them."""
    waits: list[str] = []
    if scale.device != "cuda":
        yield waits
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits += [str(warning.message) for warning in caught if SYNC_MESSAGE in str(warning.message)]


def wait_figures(scale: Scale) -> Iterator[Figure]:
    """How often the host waits for the GPU in ten training steps."""
    counts = []
    for accelerator in (None, fresh_accelerator(scale, mixed_precision="bf16")):
        program = TrainingStep(scale, accelerator)
        program.epoch()
        with recorded_waits(scale) as waits:
            program.epoch()
        counts.append(len(waits))
    by_hand, ours = counts
    what = f"waits for the GPU in {COUNTED_STEPS} training steps: bf16, pinned loader, clipping, metrics, scheduler"
    yield Figure("waits", what, "", float(ours), float(by_hand), float(ours), 0.0, "")


def loader_figures(scale: Scale) -> Iterator[Figure]:
    """Batches per second of a loader with pinned memory, whose batches are computed with."""
    width, batch, num_batches = scale.size(1 << 15, 64), scale.size(128, 4), scale.size(64, 4)
    dataset = TensorDataset(torch.zeros(batch * num_batches, width))
    weights = torch.zeros(scale.size(4096, 16), scale.size(4096, 16), device=scale.device)

    def loader() -> Any:
        return DataLoader(dataset, batch_size=batch, pin_memory=scale.device == "cuda")

    def compute(x: torch.Tensor) -> None:
        rows = x.view(-1, weights.shape[0])
        for _ in range(2):
            rows = rows @ weights

    raw, prepared = loader(), fresh_accelerator(scale).prepare(loader())

    def by_hand_epoch() -> None:
        for (x,) in raw:
            compute(x.to(scale.device, non_blocking=True))

    def prepared_epoch() -> None:
        for (x,) in prepared:
            compute(x)

    sides = {"by hand": by_hand_epoch, "prepared": prepared_epoch}
    times = by_turns(scale, sides, steps=1, rounds=scale.size(6, 2), warm_up=1)
    per_second = {name: num_batches / median_and_spread(seconds)[0] for name, seconds in times.items()}
    what = f"batches/s of a pinned loader, {batch * width * 4 / 1e6:.0f} MB each, computed with; floor: by hand"
    result = ratio(times, "prepared", "by hand")
    yield Figure("loader", what, "/s", per_second["prepared"], per_second["by hand"], result, 1.02)


def llama_figures(scale: Scale) -> Iterator[Figure]:
    """The time of a step of a Llama of a billion parameters, bf16, compiled, over that of the same step by hand."""
    data = tokens(scale, 4, 1024)

    def parts() -> tuple[Any, Any]:
        model = llama(scale, 4096, 14_336, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=scale.device == "cuda" and not scale.tiny)

    accelerator = fresh_accelerator(scale, mixed_precision="bf16", dynamo_backend="no" if scale.tiny else "inductor")
    model, optimizer = parts()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)

    def prepared() -> None:
        accelerator.backward(model(input_ids=data, labels=data).loss)
        optimizer.step()
        optimizer.zero_grad()

    sides = {"prepared": prepared}
    if scale.is_ours:  # compiling takes most of the time, and 1.15's figure needs no floor
        sides["by hand"] = llama_step_by_hand(scale, *parts(), data)
    for step in sides.values():  # which compiles
        for _ in range(scale.size(3, 1)):
            step()
    times = by_turns(scale, sides, steps=scale.size(5, 1), rounds=scale.size(8, 2))
    ours, spread = median_and_spread(times["prepared"])
    floor, _ = median_and_spread(times.get("by hand", times["prepared"]))
    result = ratio(times, "prepared", "by hand" if scale.is_ours else "prepared")
    what = f"step of a Llama of {num_parameters / 1e9:.2g} B parameters, bf16, compiled; floor: by hand"
    yield Figure("llama", what, "ms", ours * 1e3, floor * 1e3, result, 1.01, spread=spread * 1e3)


def llama_step_by_hand(scale: Scale, model: Any, optimizer: Any, data: torch.Tensor) -> Callable[[], None]:
    """The same step without a library."""
    compiled = model if scale.tiny else torch.compile(model)

    def step() -> None:
        with torch.autocast(scale.device, torch.bfloat16):
            loss = compiled(input_ids=data, labels=data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
