"""Which modules of a model are sharded as units of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from accel_state.settings.fsdp import FullyShardedDataParallelPlugin

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
