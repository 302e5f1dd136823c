"""Where `fully_shard` accumulates unsharded gradients: beside its parameters, and from torch 2.15 on in `.grad` of the unsharded ones.

The unsharded parameter exists from the first forward pass on. Newer torch lets its `.grad` outlive the parameter's data; older torch
moves it to `unsharded_accumulated_grad` (`torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn


@cache
def are_in_grad() -> bool:
    """Whether torch is new enough to accumulate in `.grad` of the unsharded parameter."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)


def keepers_of(module: nn.Module) -> Iterator[Any]:
    """Torch's `FSDPParam` of each parameter that `fully_shard` has sharded for this module itself."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return (keeper for group in groups if group for keeper in group.fsdp_params)


def make_room(model: nn.Module) -> None:
    """Make what `put_gradient` needs, where no forward pass has: all ranks must call it together.

    Args:
        model: A model, whether or not `fully_shard` was applied to its modules.
    """
    for module in model.modules() if are_in_grad() else ():
        if not all(hasattr(keeper, "_unsharded_param") for keeper in keepers_of(module)):
            module.unshard()  # type: ignore[operator]
            module.reshard()  # type: ignore[operator]


def dtype_of(keeper: Any) -> torch.dtype:
    """The dtype that unsharded gradients accumulate in."""
    if are_in_grad():
        unsharded = keeper._unsharded_param
        return getattr(unsharded, "grad_dtype", None) or unsharded.dtype
    policy = keeper.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or keeper.sharded_param.dtype
    return dtype


def put_gradient(keeper: Any, gradient: torch.Tensor | None) -> None:
    """Replace the unsharded gradient of a parameter.

    Args:
        keeper: torch's `FSDPParam`.
        gradient: On the parameter's device, in `dtype_of(keeper)`; None drops what there is.
    """
    unsharded = getattr(keeper, "_unsharded_param", None)
    if are_in_grad():
        if unsharded is not None:
            unsharded.grad = gradient
        return
    if unsharded is not None:
        unsharded.grad = None
    keeper.unsharded_accumulated_grad = gradient
