"""Counting the memory of tensors while a program runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from accel_cli.estimate.training_report import ACTIVATIONS, PARAMETERS, WEIGHT_COPIES, Phase
from accel_ops.modules import to_local

ALL = torch.ops.aten.all
TO_COPY = torch.ops.aten._to_copy.default
LIFT_FRESH = torch.ops.aten.lift_fresh.default
GROUPED_MM = torch.ops.aten._grouped_mm.default
READ_SCALAR = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


@dataclass(slots=True)
class MemoryBlock:
    """The memory of one storage.

    Attributes:
        kind: The kind of its memory.
        num_bytes: Its size now.
        owner: The module that allocated it; empty where nobody asks.
    """

    kind: str
    num_bytes: int
    owner: str = ""


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all live tensors that were created inside it, by kind.

    Memory is counted from the operation that allocates it until it is freed: until no tensor, and no graph for the backward
    pass, refers to it, or until its storage is resized to nothing, as FSDP 2 does. Views share memory, which is counted
    once. Workspace inside a kernel is not counted. Operations on DTensors are counted as those on their local tensors.

    Works with real tensors and with fake ones, which have shapes and lifetimes but no values. The value of a fake scalar
    is 1; of a bool, True if it is the result of `all` (so that no token counts as padding), otherwise False (so that no
    value counts as out of range, and nothing is resampled).

    Attributes:
        live: Kind of memory -> bytes, now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, int] = {}
        self.phase = Phase("before")
        self._blocks = WeakIdKeyDictionary()
        self._all = WeakTensorKeyDictionary()
        self._total = 0
        self._peak = 0
        self._resize: Callable[..., Any] | None = None

    def __enter__(self) -> LiveMemory:
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            block: MemoryBlock | None = self._blocks.get(storage)
            if block is not None:
                change, block.num_bytes = size - block.num_bytes, size
                self.changed(block, change)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # no operation that a mode sees
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the tensors that it creates."""
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented
        if func in READ_SCALAR and isinstance(args[0], FakeTensor):
            return self.value_of(args[0])
        result = (_grouped_mm if func is GROUPED_MM else func)(*args, **(kwargs or {}))
        if allocates(func):
            kind = WEIGHT_COPIES if func is TO_COPY and self._kind(args[0]) == PARAMETERS else ACTIVATIONS
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.count(leaf, kind)
        if func.overloadpacket is ALL:
            self._all[result] = True
        return result

    def value_of(self, tensor: torch.Tensor) -> bool | float:
        """The value that a program reads of a fake scalar."""
        if tensor.dtype is torch.bool:
            return tensor in self._all
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _kind(self, tensor: torch.Tensor) -> str | None:
        block = self._blocks.get(tensor.untyped_storage())
        return None if block is None else block.kind

    def count(self, tensor: torch.Tensor, kind: str) -> None:
        """Count the memory of a tensor, unless it is counted already, or on the meta device, where it takes none."""
        storage = tensor.untyped_storage()
        if storage in self._blocks or tensor.is_meta:
            return
        block = self.block(kind, storage.nbytes())
        self._blocks[storage] = block
        weakref.finalize(storage, self._release, block).atexit = False
        self.changed(block, block.num_bytes)

    def block(self, kind: str, num_bytes: int) -> MemoryBlock:
        """Describe new memory; a subclass adds who allocated it."""
        return MemoryBlock(kind, num_bytes)

    def _release(self, block: MemoryBlock) -> None:
        self.changed(block, -block.num_bytes)

    def changed(self, block: MemoryBlock, num_bytes: int) -> bool:
        """Count memory that was allocated or, if negative, freed; returns whether this is the peak of the phase so far."""
        self.live[block.kind] = self.live.get(block.kind, 0) + num_bytes
        self._total += num_bytes
        if self._total > self._peak:
            self._peak = self._total
            self.phase.at_peak = dict(self.live)
            return True
        return False

    def call(self, tensor: torch.Tensor, kind: str, instead_of: str | None = None) -> None:
        """Set the kind of a tensor's memory; with `instead_of`, only of memory of that kind."""
        block: MemoryBlock | None = self._blocks.get(to_local(tensor).untyped_storage())
        if block is not None and block.kind != kind and instead_of in (None, block.kind):
            self.live[block.kind] -= block.num_bytes
            block.kind = kind
            self.live[kind] = self.live.get(kind, 0) + block.num_bytes

    def begin(self, name: str) -> Phase:
        """Begin a phase: from here on the peak is the phase's own."""
        self.phase = Phase(name, dict(self.live))
        self._peak = self._total
        return self.phase

    @contextmanager
    def during(self, name: str) -> Iterator[Phase]:
        """Record the live memory while the body runs."""
        self.begin(name)
        yield self.phase
        self.phase.at_end = dict(self.live)


@cache
def allocates(func: Any) -> bool:
    """Whether results of an operation may be new memory: those of views, and of operations in place, are not.

    It matters where fake tensors are mixed with real ones, whose fake likenesses have memory that nobody allocated.
    """
    if func is LIFT_FRESH:  # of `torch.tensor`, whose memory no operation allocates
        return True
    return func.namespace != "c10d" and any(returned.alias_info is None for returned in func._schema.returns)


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class hold others, as DTensors do, whose operations a mode sees by themselves."""
    return hasattr(kind, "__tensor_flatten__")


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Grouped matrix multiplication of a mixture of experts; torch supports it for fake tensors in bfloat16 only."""
    if not isinstance(first, FakeTensor) or first.dtype is torch.bfloat16:
        return GROUPED_MM(first, second, *args, **kwargs)
    return GROUPED_MM(first.bfloat16(), second.bfloat16(), *args, **kwargs).to(first.dtype)
