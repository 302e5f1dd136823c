"""The time of a rank's operations by a roofline: FLOPs over the peak, or bytes over the bandwidth, whichever is longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from accel_cli.estimate.live_memory import is_wrapper
from accel_cli.rehearse.devices import Device

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
