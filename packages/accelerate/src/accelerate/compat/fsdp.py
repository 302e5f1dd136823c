"""Functions of 1.15 that other libraries call while they shard models themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_integrations.engines.sharded_engines import checkpoint_blocks, find_blocks, resolve_policy
from accel_integrations.precision.loss_scale import ShardedGradScaler
from accel_integrations.prepared.parameters import plain_name
from accel_ops.modules import is_peft_model
from accel_ops.tied import ensure_weights_retied as ensure_weights_retied
from accel_state.settings.fsdp import RAM_EFFICIENT_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def enable_fsdp_ram_efficient_loading() -> None:
    """From now on, load the weights of pretrained models on the main process only."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ[RAM_EFFICIENT_VARIABLE] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """From now on, load the weights of pretrained models on every process."""
    os.environ[RAM_EFFICIENT_VARIABLE] = "False"


def fsdp2_canonicalize_names(named_params: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Named parameters under the names of the user's model, without the prefixes of wrappers inside it."""
    pairs = named_params.items() if isinstance(named_params, Mapping) else named_params
    return {plain_name(name): value for name, value in pairs}


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Make the auto-wrap policy of a model: whether a module gets an FSDP group of its own. None when none does.

    Args:
        fsdp2_plugin: The settings.
        model: The model.

    Raises:
        ValueError: A class to wrap does not occur in the model.
    """
    policy = resolve_policy(fsdp2_plugin, model)
    if policy is None:
        return None
    blocks = set(find_blocks(model, policy))
    return lambda module: module in blocks


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Apply activation checkpointing to the blocks of a model."""
    plugin = accelerator.state.fsdp_plugin
    blocks = find_blocks(model, resolve_policy(plugin, model))
    checkpoint_blocks(model, blocks, offload=plugin.activation_checkpointing_offload)
    return model


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model in place, without recording it as prepared; nothing happens to one that is sharded already."""
    sharded: nn.Module = accelerator.engine.prepare_model(model)
    return sharded


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Load a full state dict of the main process into a sharded model; all ranks call this.

    Args:
        accelerator: The accelerator whose ranks shard the model.
        model: Sharded by `fully_shard`; tensors on the meta device are materialized.
        full_sd: Full tensors by name; only that of the main process is read.
        cpu_offload: Whether parameters are offloaded to CPU memory.

    Returns:
        The model.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload, strict=False)
    set_model_state_dict(model, dict(full_sd) if accelerator.is_main_process else {}, options=options)
    return model


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, torch.Tensor]) -> None:
    """Replace the parameters of an optimizer.

    Args:
        optimizer: Plain or prepared.
        mapping: New parameters by the old ones, or by their `data_ptr()`.

    Raises:
        KeyError: A parameter is not in the mapping.
    """
    for group in optimizer.param_groups:
        group["params"] = [_successor(old, mapping) for old in group["params"]]


def _successor(old: torch.Tensor, mapping: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    for key in (old, old.data_ptr()):
        if key in mapping:
            return mapping[key]
    raise KeyError(
        f"fsdp2_switch_optimizer_parameters: the mapping has no new parameter for one of shape {tuple(old.shape)}. "
        "Prepare its model before."
    )


def get_fsdp2_grad_scaler(**kwargs: Any) -> ShardedGradScaler:
    """A gradient scaler for sharded gradients, with the arguments of `torch.amp.GradScaler`."""
    return ShardedGradScaler(**kwargs)


def _get_model_state_dict(
    model: nn.Module, adapter_only: bool = False, sd_options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The state dict of a model, or of its active adapter only.

    Args:
        model: The model; with options it may be sharded.
        adapter_only: Take the weights of the active adapter, if it is a model of peft.
        sd_options: How torch collects it; None for `model.state_dict()`.
    """
    if adapter_only and is_peft_model(model):
        from peft import get_peft_model_state_dict

        adapter: Any = model.active_adapter
        state: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=adapter)
        return state
    if sd_options is None:
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict as get_state

    return get_state(model, options=sd_options)


def _set_model_state_dict(
    model: nn.Module,
    state_dict: dict[str, Any],
    adapter_only: bool = False,
    sd_options: StateDictOptions | None = None,
) -> Any:
    """Load a state dict into a model, or into its active adapter only; see `_get_model_state_dict`.

    Returns:
        The keys that were missing, and those that were not expected.
    """
    if adapter_only and is_peft_model(model):
        from peft import set_peft_model_state_dict

        adapter: Any = model.active_adapter
        return set_peft_model_state_dict(model, state_dict, adapter_name=adapter)
    if sd_options is None:
        return model.load_state_dict(state_dict)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict as set_state

    return set_state(model, state_dict, options=sd_options)
