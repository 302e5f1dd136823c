"""Back from a prepared model to the one the user built."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import nn

from accel_ops.modules import has_compiled_regions, is_compiled_module

WRAPPERS = {
    # module: class; consulted only where somebody has imported the module
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "deepspeed": "DeepSpeedEngine",
}


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Take a model out of what a way of training put around it.

    Args:
        model (`torch.nn.Module`): A prepared model, or any other.
        keep_fp32_wrapper (`bool`): False also restores the forward as it was without mixed precision.
        keep_torch_compile (`bool`): Whether the result is compiled when `model` is.
        recursive (`bool`): Look into children too.

    Returns:
        The model inside; `model` itself stays as it is, but for its forward with `keep_fp32_wrapper=False`.
    """
    wrappers = _wrapper_classes()
    compiled = model if _is_compiled(model) else None
    if compiled is not None:
        model = _inside_compiled(compiled)
    inner = _without(model, wrappers, recursive)
    if not keep_fp32_wrapper:
        _restore_forward(inner)
    if compiled is None or not keep_torch_compile:
        return inner
    return _compiled_like(compiled, inner)


def _wrapper_classes() -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in WRAPPERS.items())
    return tuple(kind for kind in found if kind is not None)


def _is_compiled(model: Any) -> bool:
    return isinstance(model, nn.Module) and (is_compiled_module(model) or "_orig_mod" in model.__dict__)


def _inside_compiled(model: nn.Module) -> nn.Module:
    inner: nn.Module = model._orig_mod if is_compiled_module(model) else model.__dict__["_orig_mod"]  # type: ignore[assignment]
    return inner


def _compiled_like(compiled: nn.Module, inner: nn.Module) -> nn.Module:
    """`inner`, compiled as `compiled` is, without touching the latter."""
    if is_compiled_module(compiled):
        if compiled._orig_mod is inner:
            return compiled
        again: nn.Module = type(compiled)(inner, compiled.dynamo_ctx)
        return again
    found = _unwrapped(compiled)
    assert has_compiled_regions(found)
    return found


def _unwrapped(model: Any, wrappers: tuple[type, ...] | None = None) -> Any:
    wrappers = _wrapper_classes() if wrappers is None else wrappers
    inner: Any = model
    while isinstance(inner, wrappers):
        inner = getattr(inner, "module")  # noqa: B009 - typed as a plain object
    return inner


def _without(model: Any, wrappers: tuple[type, ...], recursive: bool) -> Any:
    model = _unwrapped(model, wrappers)
    if recursive and isinstance(model, nn.Module):
        for name, child in list(model.named_children()):
            inner = _without(child, wrappers, recursive)
            if inner is not child:
                setattr(model, name, inner)
    return model


def _restore_forward(model: Any) -> None:
    original = getattr(model, "__dict__", {}).pop("_original_forward", None)
    if original is None:
        return
    if isinstance(original, MethodType) and original.__self__ is model and _is_own_forward(original, model):
        model.__dict__.pop("forward", None)  # the class's method shows again
    else:
        model.forward = original


def _is_own_forward(method: MethodType, model: Any) -> bool:
    return getattr(type(model), "forward", None) is method.__func__
