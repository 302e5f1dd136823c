"""The memory of a rank: by kind, by the module that allocated it, and over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from accel_cli.estimate.live_memory import Block, LiveMemory
from accel_cli.estimate.training_report import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, Phase
from accel_cli.rehearse.result import COMMUNICATION, HOST, UPDATES
from accel_ops.modules import to_local

WAIT = torch.ops._c10d_functional.wait_tensor.default
BEFORE = "before the first step"


class RankMemory(LiveMemory):
    """As `LiveMemory`, for a training script that nobody wrote for it.

    Attributes:
        module: The name of the module whose forward pass runs; empty outside of any.
        is_stepping: Whether an optimizer takes a step.
        at_peak: Module -> bytes that it allocated and that are alive at the peak of the phase.
        timeline: Kind of memory -> bytes, after each change in the phase; every entry with its number of operations before it.
        on_read: Called with each fake scalar whose value the program reads.
    """

    def __init__(self, on_read: Callable[[Any], None] = lambda value: None) -> None:
        super().__init__()
        self.module = ""
        self.is_stepping = False
        self.at_peak: dict[str, int] = {}
        self.timeline: list[tuple[int, dict[str, int]]] = []
        self._on_read = on_read
        self._by_module: dict[str, int] = {}
        self._clock = 0
        self.begin(BEFORE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the tensors that it creates; those of FSDP's copies are for communication."""
        self._clock += 1
        if func is WAIT and isinstance(args[0], FakeTensor):  # for which torch would make another tensor
            return args[0]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "fsdp":
            for leaf in tree_leaves((args, kwargs, result)):
                if isinstance(leaf, torch.Tensor):
                    self.call(leaf, COMMUNICATION, ACTIVATIONS)
        return result

    @override
    def value_of(self, tensor: torch.Tensor) -> bool | float:
        """The value that a program reads of a fake scalar; noted."""
        value = super().value_of(tensor)
        self._on_read(value)
        return value

    @override
    def block(self, kind: str, num_bytes: int) -> Block:
        """Describe new memory, by the module that runs."""
        return Block(UPDATES if self.is_stepping and kind == ACTIVATIONS else kind, num_bytes, self.module)

    @override
    def changed(self, block: Block, num_bytes: int) -> bool:
        """Count by module, too, and note the time."""
        self._by_module[block.owner] = self._by_module.get(block.owner, 0) + num_bytes
        is_peak = super().changed(block, num_bytes)
        if is_peak:
            self.at_peak = dict(self._by_module)
        if num_bytes and self.phase.name != BEFORE:
            self.timeline.append((self._clock, dict(self.live)))
        return is_peak

    @override
    def begin(self, name: str) -> Phase:
        """Begin a phase, such as a step."""
        self.timeline, self.at_peak = [], dict(self._by_module)
        return super().begin(name)

    # ---- kinds ----------------------------------------------------------------------------------------------------

    def rename(self, kind: str, other: str) -> None:
        """Set the kind of all memory of one kind."""
        for block in list(self._blocks.values()):
            if block.kind == kind:
                block.kind = other
        self.live[other] = self.live.get(other, 0) + self.live.pop(kind, 0)

    def call_model(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        """Set the kind of the parameters and buffers of a model, and which module they belong to."""
        for module in model.modules():
            for parameter in module._parameters.values():
                self._own(parameter, PARAMETERS, names.get(module, ""))
            for buffer in module._buffers.values():
                self._own(buffer, BUFFERS, names.get(module, ""))

    def _own(self, tensor: torch.Tensor | None, kind: str, owner: str) -> None:
        if tensor is None:
            return
        self.call(tensor, kind, ACTIVATIONS)
        self.call(tensor, kind, HOST)
        block: Block | None = self._blocks.get(to_local(tensor).untyped_storage())
        if block is not None and block.owner != owner:
            self._by_module[block.owner] -= block.num_bytes
            block.owner = owner
            self._by_module[owner] = self._by_module.get(owner, 0) + block.num_bytes

    def call_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the kind of what an optimizer updates, and of its state."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.call(parameter, PARAMETERS)
                if parameter.grad is not None:
                    self.call(parameter.grad, GRADIENTS)
        for state in optimizer.state.values():
            for value in tree_leaves(state):
                if isinstance(value, torch.Tensor):
                    self.call(value, OPTIMIZER)
