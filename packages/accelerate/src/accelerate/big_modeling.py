"""Compatibility path for models larger than memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_bigmodel.budgets import get_balanced_memory as get_balanced_memory
from accel_bigmodel.device_map.check import check_device_map as check_device_map
from accel_bigmodel.device_map.plan import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.dispatch import cpu_offload as cpu_offload
from accel_bigmodel.dispatch import disk_offload as disk_offload
from accel_bigmodel.dispatch import dispatch_model as dispatch_model
from accel_bigmodel.dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accel_bigmodel.empty import init_empty_weights as init_empty_weights
from accel_bigmodel.empty import init_on_device as init_on_device
from accel_bigmodel.hooks.align import AlignDevicesHook as AlignDevicesHook
from accel_bigmodel.hooks.attach import attach_align_device_hook as attach_align_device_hook
from accel_bigmodel.hooks.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from accel_bigmodel.hooks.attach import materialize_meta_tensors as materialize_meta_tensors
from accel_bigmodel.hooks.cast import LayerwiseCastingHook as LayerwiseCastingHook
from accel_bigmodel.hooks.cast import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from accel_bigmodel.hooks.hook import add_hook_to_module as add_hook_to_module
from accel_bigmodel.hooks.user_offload import CpuOffload as CpuOffload
from accel_bigmodel.hooks.user_offload import UserCpuOffloadHook as UserCpuOffloadHook
from accel_bigmodel.hooks.user_offload import cpu_offload_with_hook as cpu_offload_with_hook
from accel_bigmodel.offload.folder import offload_state_dict as offload_state_dict
from accel_bigmodel.offload.loader import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel_bigmodel.offload.loader import extract_submodules_state_dict as extract_submodules_state_dict
from accel_bigmodel.replaceable import register_lookup
from accel_bigmodel.streaming.settings import Streaming as Streaming
from accel_bigmodel.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_integrations.parallel.patched_attention import check_no_recurrent_layers
from accel_ops.tied import find_tied_parameters as find_tied_parameters
from accel_ops.tied import retie_parameters as retie_parameters
from accelerate.compat.legacy import legacy_getattr

_refuse_recurrent_layers_under_sequence_parallelism = check_no_recurrent_layers
__getattr__ = legacy_getattr(__name__)  # what programs import from here


def _attach_context_parallel_hooks(model: nn.Module) -> None:
    """Have modules called `self_attn` ignore the attention mask they are given, and attend causally.

    For programs that shard sequences themselves, or look for this name, as LeRobot does; `prepare` has hooks of its own.

    Args:
        model: Changed in place.

    Raises:
        ValueError: The model has layers that attend to fewer tokens than all earlier ones (windows, chunks).
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    default = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    others = sorted({*(getattr(config, "layer_types", None) or default)} - {"full_attention"})
    if others:
        raise ValueError(
            f"Context parallelism drops the attention masks that layers of the types {others} of {type(model).__name__} need. Train it "
            "without sharding sequences (cp_size=1)."
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_attend_causally, prepend=True, with_kwargs=True)


def _attend_causally(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (args, {**kwargs, "attention_mask": None, "is_causal": True}) if "attention_mask" in kwargs else None


register_lookup("check_device_map", lambda: check_device_map)  # a seam: transformers sets its own
