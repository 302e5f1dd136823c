"""Functions that the engines with sharded parameters share, and a check that all engines but DeepSpeed's share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_state.mesh import ParallelismConfig
    from accel_state.settings.fsdp import FullyShardedDataParallelPlugin


def check_no_ulysses(config: ParallelismConfig, engine: str) -> None:
    """Reject the sequence parallelism of DeepSpeed (Ulysses) under another engine.

    Raises:
        ValueError: It is asked for; the message says what to pass instead.
    """
    if config.sp_enabled and config.sp_backend == "deepspeed":
        raise ValueError(
            f"sp_size={config.sp_size} with sp_backend='deepspeed' needs DeepSpeed, but the engine is {engine!r}. Pass "
            "a DeepSpeedPlugin, and no other plugin, or choose sp_backend='torch'."
        )


def check_mesh(engine: Engine) -> None:
    """Check that the mesh has a dimension along which parameters are sharded.

    Raises:
        ValueError: It has none; the message names the sizes.
    """
    config = engine.context.state.parallelism_config
    if config is None:
        return
    check_no_ulysses(config, engine.name)
    if config.total_size > 1 and not config.dp_shard_cp_dim_names:
        sizes = ", ".join(f"{axis}_size={getattr(config, f'{axis}_size')}" for axis in config.active_mesh_dims)
        raise ValueError(
            f"ParallelismConfig({sizes}) leaves no ranks over which the FSDP plugin could shard parameters. Set dp_shard_size to "
            "more than 1, and the other sizes so that the product is the number of processes, or leave the plugin out."
        )


def num_averaged(engine: Engine) -> int:
    """Number of ranks over which an engine with sharded parameters averages gradients."""
    state = engine.context.state
    config = state.parallelism_config
    if config is None or config.total_size == 1:
        return state.num_processes
    return config.total_size // (config.tp_size * config.pp_size)


def warn_no_join(name: str) -> AbstractContextManager[None]:
    """Warn that ranks with sharded parameters cannot run a forward pass without the others."""
    warn_user(
        f"join_uneven_inputs() has no effect with the {name!r} engine: ranks that hold shards of the model need each "
        "other in every forward pass. Give all processes the same number of batches (even_batches=True)."
    )
    return nullcontext()


CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward before which parameters could be all-gathered


def resolve_policy(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> Any:
    """The plugin's wrapping policy for one model; the plugin is not changed.

    Args:
        plugin: The settings.
        model: Searched for the module classes that the settings name.

    Returns:
        A function or a policy object of torch; None where only the root module is wrapped.

    Raises:
        ValueError: When a class to wrap does not occur in the model.
    """
    fitted = copy.copy(plugin)
    fitted.set_auto_wrap_policy(model)
    return fitted.auto_wrap_policy


def find_blocks(model: nn.Module, policy: Any) -> list[nn.Module]:
    """The submodules that a policy wraps, each after its own submodules.

    Args:
        model: The root module, which is not in the result.
        policy: A policy of torch: a function of `module`, `recurse` and `nonwrapped_numel`, an object of torch's policy
            classes, or None for no modules.
    """
    if policy is None:
        return []
    if not callable(policy) or hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(model, set(), {})
        return [module for module in _children_first(model) if module in chosen and module is not model]
    blocks: list[nn.Module] = []
    _collect(model, policy, blocks, set(), is_root=True)
    return blocks


def _collect(
    module: nn.Module, policy: Callable[..., bool], blocks: list[nn.Module], seen: set[nn.Module], *, is_root: bool
) -> int:
    """Collect the blocks in a module, and the module itself; returns how many of its elements (numel) are in blocks."""
    if module in seen:
        return 0
    seen.add(module)
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(_collect(child, policy, blocks, seen, is_root=False) for child in module.children())
    if is_root or isinstance(module, CONTAINERS):
        return wrapped
    if not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        return wrapped
    blocks.append(module)
    return numel


def _children_first(module: nn.Module) -> list[nn.Module]:
    return list(dict.fromkeys([inner for child in module.children() for inner in _children_first(child)] + [module]))


def checkpoint_blocks(model: nn.Module, blocks: Sequence[nn.Module], *, offload: bool = False) -> list[nn.Module]:
    """Apply activation checkpointing to blocks of a model.

    Args:
        model: The model, in which the blocks are replaced by wrapped ones.
        blocks: Modules inside it.
        offload: Also offload the saved inputs to CPU memory; without effect on the CPU.

    Returns:
        The wrapped blocks.
    """
    if not blocks:
        return []
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )

    chosen = set(blocks)
    offloads = offload and torch.accelerator.is_available()
    wrapped: dict[nn.Module, nn.Module] = {}

    def wrap(module: nn.Module) -> nn.Module:
        checkpointed = checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        wrapped[module] = offload_wrapper(checkpointed) if offloads else checkpointed
        return wrapped[module]

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: module in chosen)
    return [wrapped[block] for block in blocks]
