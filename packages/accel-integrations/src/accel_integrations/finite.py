"""Which tensors are finite: a norm that is finite clears all of them at once, and only otherwise each one is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_integrations.gradients import GradientGroup, joint_norm
from accel_ops.modules import to_local


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A 0-dim float32 that is inf or NaN if an element of any tensor is; large finite elements may make it inf, too."""
    return joint_norm([GradientGroup([_values(tensor) for tensor in tensors])], 2.0)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor are finite."""
    return bool(_values(tensor).isfinite().all())


@torch.no_grad()
def has_finite_weights(model: nn.Module) -> bool:
    """Whether the weights of a model that this rank holds are finite, and no buffer that a state dict holds has a NaN.

    Buffers may hold inf on purpose, as masks do. Quantized weights and those on no device (meta, disk) count as finite.
    """
    weights = list(_looked_at(getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()))
    buffers = list(_looked_at(_stored_buffers(model)))
    if norm_of([*weights, *buffers]).isfinite():
        return True
    return all(map(is_finite, weights)) and not any(bool(buffer.isnan().any()) for buffer in buffers)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._values() if tensor.is_sparse else tensor


def _stored_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _looked_at(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in map(to_local, tensors):
        is_number = (tensor.is_floating_point() and tensor.element_size() > 1) or tensor.is_complex()
        if is_number and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor):
            yield tensor
