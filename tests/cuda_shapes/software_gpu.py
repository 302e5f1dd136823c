"""A dispatch mode that computes on the CPU what the pretended driver's kernels do not.

Tensors on `cuda` are real ones of torch's CUDA allocator, whose memory is host memory here (`pretended_driver.c`). So views,
allocations, copies of whole tensors, streams and events are torch's own; only what would launch a kernel is computed by the
CPU, in the same memory. A device mismatch raises as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.cuda_shapes import pretended_group
from tests.cuda_shapes.kernels import ON_CPU
from tests.cuda_shapes.memory import memory_of, upload

aten = torch.ops.aten
NATIVE = {  # no kernel is launched, or torch's own copies of bytes do it
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.resize_.default, aten._local_scalar_dense.default, aten.record_stream.default,
    aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor, aten.set_.default,
    aten.is_pinned.default, aten._pin_memory.default, aten.is_same_size.default, aten._has_compatible_shallow_copy_type.default,
    aten.lift_fresh.default, aten._reshape_alias.default, aten._unsafe_view.default,
}  # fmt: skip
ANY_DEVICES = {"copy_", "_to_copy", "set_", "_foreach_copy_", "index", "index_put_", "_index_put_impl_"}


def is_view(func: Any) -> bool:
    """Whether the results share the memory of an argument that is not written."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


class SoftwareGpu(TorchDispatchMode):
    """Computes on the CPU; `observe(func, args, kwargs, result)` is called after every operation."""

    def __init__(self, observe: Callable[..., None] = lambda *_: None) -> None:
        super().__init__()
        self.observe = observe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensors learn shapes by fake tensors, which have no memory
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor's own operations come back here with plain tensors
        result = self._run(func, args, kwargs)
        self.observe(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return pretended_group.complete(func._opname, args, func(*args, **kwargs))
        if func.namespace.startswith("_c10d_functional"):
            return pretended_group.complete_functional(func._opname, args, func(*args, **kwargs))
        leaves, structure = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        wanted = kwargs.get("device")
        device = (
            torch.device(wanted) if wanted is not None else next((one.device for one in given if one.is_cuda), None)
        )
        touches = any(one.is_cuda for one in given) or (device is not None and device.type == "cuda")
        if not touches or device is None:
            return func(*args, **kwargs)
        if func in NATIVE or is_view(func):
            return func(*args, **kwargs)
        if func._schema.name.removeprefix("aten::") not in ANY_DEVICES:
            check_devices(func, given)
        return self._compute(func, leaves, structure, device)

    @staticmethod
    def _compute(func: Any, leaves: list[Any], structure: Any, device: torch.device) -> Any:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        names = {}  # the memory of each argument, and the argument
        moved = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                memory = memory_of(leaf)
                names[id(memory)] = (memory, leaf)
                leaf = memory
            elif isinstance(leaf, torch.device):
                leaf = torch.device("cpu")
            elif isinstance(leaf, torch.Generator) and leaf.device.type == "cuda":
                leaf = None
            moved.append(leaf)
        args, kwargs = tree_unflatten(moved, structure)
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        result = ON_CPU.get(func, func)(*args, **kwargs)

        def back(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in names:
                return names[id(tensor)][1]  # changed in place
            return tensor if device.type == "cpu" else upload(tensor, device)

        return tree_map_only(torch.Tensor, back, result)


def check_devices(func: Any, tensors: list[torch.Tensor]) -> None:
    """Raise as kernels do when tensors lie on different devices; those of one CPU value may be anywhere."""
    devices = {str(one.device) for one in tensors if one.dim() > 0 or one.is_cuda}
    if len(devices) > 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {sorted(devices)}")
