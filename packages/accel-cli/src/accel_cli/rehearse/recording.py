"""Recording the steps of a training script: memory, collectives and work of one rank, in a rehearsal or in a real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_cli.estimate.training_report import ACTIVATIONS, GRADIENTS
from accel_cli.rehearse.devices import Device
from accel_cli.rehearse.memory import RankMemory
from accel_cli.rehearse.result import COMMUNICATION, HOST
from accel_cli.rehearse.roofline import Roofline, Work
from accel_cli.rehearse.traffic import Collective, Traffic


@dataclass(slots=True)
class Step:
    """One optimizer step of a rank, with the forward and backward passes before it.

    Attributes:
        at_peak: Kind of memory -> bytes, at the peak.
        by_module: Module -> bytes that it allocated and that are alive at the peak.
        timeline: Pairs of the number of operations so far and kind of memory -> bytes.
        collectives: Each kind of collective, and how often it ran.
        work: What was computed.
        batch: As in `Result`, of each batch that was read.
    """

    at_peak: dict[str, int]
    by_module: dict[str, int]
    timeline: list[tuple[int, dict[str, int]]]
    collectives: Counter[Collective]
    work: Work
    batch: list[list[int]] = field(default_factory=list)


class Recorder:
    """A context that records the optimizer steps inside it.

    Args:
        device: The device that would compute.
        on_step: Called with each step once it is taken.
        on_read: Called with each value that the script reads of a tensor without values.

    Attributes:
        steps: What was recorded.
        memory: The counter of memory.
    """

    def __init__(
        self,
        device: Device,
        on_step: Callable[[Step], None] = lambda step: None,
        on_read: Callable[[Any], None] = lambda value: None,
    ) -> None:
        self.steps: list[Step] = []
        self.memory = RankMemory(on_read)
        self._roofline = Roofline(device)
        self._collectives: Counter[Collective] = Counter()
        self._on_step = on_step
        self._batches: list[list[int]] = []
        self._modules: list[str] = []
        self._names: dict[nn.Module, str] = {}
        self._models: list[nn.Module] = []
        self._stepping: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        for mode in (self.memory, Traffic(self._note), self._roofline):
            self._stack.enter_context(mode)
        hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        for hook in hooks:
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def is_evaluating(self) -> bool:
        """Whether the script has put every model that it called into evaluation mode."""
        return bool(self._models) and not any(model.training for model in self._models)

    def begin_batch(self, counts: list[int]) -> None:
        """Note that the script has been given a batch, before which what is alive is its own."""
        if not self.steps and not self._batches:
            self.memory.rename(ACTIVATIONS, HOST)
            self._begin()
        self._batches.append(counts)

    def _begin(self) -> None:
        self.memory.begin(f"step {len(self.steps)}")
        self._collectives = Counter()
        self._roofline.work = Work()
        self._batches = []

    def _note(self, collective: Collective, tensors: list[torch.Tensor]) -> None:
        self._collectives[collective] += 1
        reduced = collective.name == "reduce-scatter" and collective.in_background
        for tensor in tensors:
            self.memory.call(tensor, COMMUNICATION, ACTIVATIONS)
        if reduced:
            smallest = min(tensors, key=lambda tensor: tensor.numel())
            self.memory.call(smallest, GRADIENTS, COMMUNICATION)

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if not self._modules and module not in self._names:
            self._names |= {inner: name or type(module).__name__ for name, inner in module.named_modules()}
            self.memory.call_model(module, self._names)
            self._models.append(module)
        self._modules.append(self.memory.module)
        self.memory.module = self._names.get(module, self.memory.module)

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.memory.module = self._modules.pop()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.memory.call_optimizer(optimizer)
        self.memory.is_stepping = True

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.memory.is_stepping = False
        self.memory.call_optimizer(optimizer)
        if self._stepping is None:
            self._stepping = optimizer
        if optimizer is not self._stepping:
            return
        memory = self.memory
        step = Step(
            memory.phase.at_peak, memory.at_peak, memory.timeline, self._collectives, self._roofline.work, self._batches
        )  # fmt: skip
        self.steps.append(step)
        self._begin()
        self._on_step(step)
