"""Recording the steps of a training script: memory, collectives and work of one rank, in a rehearsal or in a real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from accel_cli.estimate.live_memory import LiveMemory, MemoryBlock, is_wrapper
from accel_cli.estimate.training_report import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, Phase
from accel_cli.rehearse.devices import Device
from accel_cli.rehearse.result import COMMUNICATION, HOST, UPDATES
from accel_cli.rehearse.traffic import Collective, Traffic
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
    def block(self, kind: str, num_bytes: int) -> MemoryBlock:
        """Describe new memory, by the module that runs."""
        return MemoryBlock(UPDATES if self.is_stepping and kind == ACTIVATIONS else kind, num_bytes, self.module)

    @override
    def changed(self, block: MemoryBlock, num_bytes: int) -> bool:
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
        block: MemoryBlock | None = self._blocks.get(to_local(tensor).untyped_storage())
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


aten = torch.ops.aten
NOT_COMPUTED = ("c10d", "_c10d_functional", "prim", "prims")


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


def _of_outputs(formula: Callable[..., int]) -> Callable[..., int]:
    """A formula of torch, for operations with tensors."""
    return lambda *args, out_val, **kwargs: formula(*args, **kwargs, out_val=out_val)


FLOPS: dict[Any, Callable[..., int]] = {
    **{operation: _of_outputs(formula) for operation, formula in flop_registry.items()},
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(slots=True)
class Work:
    """What was computed.

    Attributes:
        flops: Floating-point operations of matrix multiplications, convolutions and attention.
        seconds: The roofline of all operations, one after the other: each reads its inputs from memory and writes its results.
        shortest_seconds: FLOPs over the peak of their dtype: nothing is faster.
    """

    flops: int = 0
    seconds: float = 0.0
    shortest_seconds: float = 0.0


class Roofline(TorchDispatchMode):
    """Adds up the work of the operations that run inside it.

    Args:
        device: The device that would compute.

    Attributes:
        work: Since it was last replaced.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.work = Work()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and add its work."""
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace not in NOT_COMPUTED:
            self._add(func, args, kwargs or {}, result)
        return result

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = FLOPS.get(func.overloadpacket)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in (*inputs, *outputs))
        seconds = num_bytes / (self._device.memory_gbps * 1e9)
        if formula is not None and inputs:
            flops = int(formula(*args, **kwargs, out_val=result))
            shortest = flops / self._device.peak_flops(str(inputs[0].dtype).removeprefix("torch."))
            self.work.flops += flops
            self.work.shortest_seconds += shortest
            seconds = max(seconds, shortest)
        self.work.seconds += seconds


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
