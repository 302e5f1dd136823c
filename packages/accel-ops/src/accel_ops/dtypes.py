"""Converting half-precision outputs to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch

from accel_ops.nested import honor_mapping, honor_type
from accel_state.public_names import known_as

HALF = (torch.float16, torch.bfloat16)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the float16 and bfloat16 tensors of a nested structure to float32; other leaves are returned unchanged."""
    if isinstance(tensor, torch.Tensor):
        return tensor.float() if tensor.dtype in HALF else tensor
    if isinstance(tensor, (tuple, list)):
        return honor_type(tensor, (convert_to_fp32(item) for item in tensor))
    if isinstance(tensor, Mapping):
        return honor_mapping(tensor, {key: convert_to_fp32(item) for key, item in tensor.items()})
    return tensor


@known_as("accelerate.utils.operations.ConvertOutputsToFp32")
class ConvertOutputsToFp32:
    """A forward function whose outputs are converted to float32.

    Args:
        model_forward: The forward function to call.
    """

    model_forward: Callable[..., Any]

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it and convert its outputs."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        """Raise an error.

        Raises:
            pickle.PicklingError: Always, because the autocast context of the forward pass cannot be pickled.
        """
        import pickle

        raise pickle.PicklingError(
            "A model prepared for mixed precision cannot be pickled: pass accelerator.unwrap_model(model, "
            "keep_fp32_wrapper=False)."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward function so that its outputs are converted to float32; `__wrapped__` is the original."""
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]
    return forward


@contextmanager
def GatheredParameters(  # noqa: N802 - the name of the interface
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """A context in which parameters that ZeRO stage 3 of DeepSpeed has sharded are full tensors; nothing without it.

    Args:
        params: The parameters.
        modifier_rank (`int`, *optional*): The rank whose changes are kept.
        fwd_module (`torch.nn.Module`, *optional*): As for `deepspeed.zero.GatheredParameters`.
        enabled (`bool`): Whether to gather at all.
    """
    from accel_state.accelerator_state import AcceleratorState

    plugin = AcceleratorState().deepspeed_plugin if AcceleratorState._shared_state else None
    if plugin is None or plugin.zero_stage != 3:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(
        params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    ):
        yield
