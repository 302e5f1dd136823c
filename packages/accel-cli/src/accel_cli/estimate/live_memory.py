"""Counting the memory of tensors while a program runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from accel_cli.estimate.training_report import ACTIVATIONS, PARAMETERS, WEIGHT_COPIES, Phase

ALL = torch.ops.aten.all
TO_COPY = torch.ops.aten._to_copy.default
GROUPED_MM = torch.ops.aten._grouped_mm.default
READ_SCALAR = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


@dataclass(slots=True)
class _Block:
    kind: str
    num_bytes: int


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all live tensors that were created inside it, by kind.

    Memory is counted from the operation that allocates it until it is freed: until no tensor, and no graph for the backward
    pass, refers to it. Views share memory, which is counted once. Workspace inside a kernel is not counted.

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the tensors that it creates."""
        if func in READ_SCALAR and isinstance(args[0], FakeTensor):
            return self._value(args[0])
        result = (_grouped_mm if func is GROUPED_MM else func)(*args, **(kwargs or {}))
        kind = WEIGHT_COPIES if func is TO_COPY and self._kind(args[0]) == PARAMETERS else ACTIVATIONS
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf, kind)
        if func.overloadpacket is ALL:
            self._all[result] = True
        return result

    def _value(self, tensor: torch.Tensor) -> bool | float:
        if tensor.dtype is torch.bool:
            return tensor in self._all
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _kind(self, tensor: torch.Tensor) -> str | None:
        block = self._blocks.get(tensor.untyped_storage())
        return None if block is None else block.kind

    def _count(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        if storage in self._blocks:
            return
        block = _Block(kind, storage.nbytes())
        self._blocks[storage] = block
        weakref.finalize(storage, self._release, block).atexit = False
        self._add(block, block.num_bytes)

    def _release(self, block: _Block) -> None:
        self._add(block, -block.num_bytes)

    def _add(self, block: _Block, num_bytes: int) -> None:
        self.live[block.kind] = self.live.get(block.kind, 0) + num_bytes
        self._total += num_bytes
        if self._total > self._peak:
            self._peak = self._total
            self.phase.at_peak = dict(self.live)

    def call(self, tensor: torch.Tensor, kind: str) -> None:
        """Set the kind of a tensor's memory."""
        block: _Block | None = self._blocks.get(tensor.untyped_storage())
        if block is not None and block.kind != kind:
            self.live[block.kind] -= block.num_bytes
            block.kind = kind
            self.live[kind] = self.live.get(kind, 0) + block.num_bytes

    @contextmanager
    def during(self, name: str) -> Iterator[Phase]:
        """Record the live memory while the body runs."""
        self.phase = Phase(name, dict(self.live))
        self._peak = self._total
        yield self.phase
        self.phase.at_end = dict(self.live)


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Grouped matrix multiplication of a mixture of experts; torch supports it for fake tensors in bfloat16 only."""
    if not isinstance(first, FakeTensor) or first.dtype is torch.bfloat16:
        return GROUPED_MM(first, second, *args, **kwargs)
    return GROUPED_MM(first.bfloat16(), second.bfloat16(), *args, **kwargs).to(first.dtype)
