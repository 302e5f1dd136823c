"""Removing the wrappers of a prepared model."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import nn

from accel_ops.modules import is_compiled_module

WRAPPERS = {
    # module: class; looked up only in modules that are imported already
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "deepspeed": "DeepSpeedEngine",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": "SpmdFullyShardedDataParallel",
    "accel_integrations.parallel.pipeline.model": "PipelinedModel",
    "accel_integrations.megatron.model": "MegatronEngine",
}


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Remove the wrappers that an engine has put around a model.

    Args:
        model (`torch.nn.Module`): A prepared model, or any other.
        keep_fp32_wrapper (`bool`): False also restores the forward as it was without mixed precision.
        keep_torch_compile (`bool`): Whether the result is compiled when `model` is.
        recursive (`bool`): Look into children too.

    Returns:
        The model inside; `model` itself does not change, except for its forward with `keep_fp32_wrapper=False`.
    """
    compiled = model if _is_compiled(model) else None
    wrappers = _wrapper_classes()
    inner = _without(model if compiled is None else _inside_compiled(compiled), wrappers, recursive)
    if not keep_fp32_wrapper:
        _restore_forward(inner)
        _restore_forward(compiled)
    if not keep_torch_compile:
        return _inside_compiled(inner) if _is_compiled(inner) else inner
    if compiled is None:
        return inner
    if is_compiled_module(compiled):
        return compiled if compiled._orig_mod is inner else _compiled_like(compiled, inner)
    regional = _without(compiled, wrappers, recursive)
    if not keep_fp32_wrapper:
        _restore_forward(regional)
    return regional


def _wrapper_classes() -> tuple[type, ...]:
    candidates = (getattr(sys.modules.get(module), name, None) for module, name in WRAPPERS.items())
    return tuple(kind for kind in candidates if kind is not None)


def _is_compiled(model: Any) -> bool:
    """Whether the full model is compiled, or was made by `compile_regions`."""
    return isinstance(model, nn.Module) and (is_compiled_module(model) or "_orig_mod" in model.__dict__)


def _inside_compiled(model: Any) -> Any:
    return model._orig_mod if is_compiled_module(model) else model.__dict__["_orig_mod"]


def _compiled_like(compiled: Any, inner: nn.Module) -> Any:
    """`inner`, compiled as `compiled` is, without touching the latter."""
    return type(compiled)(inner, compiled.dynamo_ctx)


def _without(model: Any, wrappers: tuple[type, ...], recursive: bool) -> Any:
    while isinstance(model, wrappers):
        model = model.module  # type: ignore[attr-defined]
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
    if isinstance(original, MethodType) and getattr(type(model), "forward", None) is original.__func__:
        del model.__dict__["forward"]  # the class's method shows again
    else:
        model.__dict__["forward"] = original
