"""Tensor and expert parallel plans of transformers models, which bring their own styles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HEADS = ("num_attention_heads", "num_key_value_heads")


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is a `PreTrainedModel` of transformers."""
    transformers = sys.modules.get("transformers.modeling_utils")  # imported by whoever has built one
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def transformers_models(model: nn.Module) -> Iterator[Any]:
    """The models of transformers that a model is or contains, for example in an adapter, without those within them."""
    if is_transformers_model(model):
        yield model
        return
    for child in model.children():
        yield from transformers_models(child)


def brings_own_styles(model: nn.Module) -> bool:
    """Whether transformers itself can shard the model: its versions from 5.20 on, where the model has a plan."""
    return is_transformers_model(model) and hasattr(model, "_resolve_parallel_plans") and bool(_plans_of(model))


def tensor_plan(model: Any, size: int, experts: bool) -> dict[str, str]:
    """The style of every layer and parameter to shard.

    Args:
        model: A transformers model.
        size: Over how many ranks.
        experts: Whether experts are sharded by expert parallelism, so that the plan must not shard them.

    Raises:
        ValueError: When the model has no plan, or its heads cannot be split evenly.
    """
    _check_heads(model, size)
    plan: dict[str, str] = _resolve(model, size, experts)[0]
    return plan


def expert_plan(model: Any, size: int) -> dict[str, str]:
    """The style of every layer and parameter that belongs to experts.

    Args:
        model: A transformers model.
        size: Over how many ranks.

    Raises:
        ValueError: When the model has no plan for experts.
    """
    plan: dict[str, str] = _resolve(model, size, True)[1]
    return plan


def shard_transformers_model(model: Any, mesh: DeviceMesh, experts: bool) -> None:
    """Shard a model by its own plan, in place.

    Args:
        model: A transformers model, the same on all ranks of the mesh.
        mesh: One-dimensional.
        experts: Whether experts are sharded by expert parallelism instead.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    names = {name for name, _ in chain(model.named_modules(), model.named_parameters())}  # tied parameters once
    plan = tensor_plan(model, mesh.size(), experts)
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name in names})
    model.tie_weights()
    model._tp_size = mesh.size()  # its trainer asks


def shard_experts(model: Any, mesh: DeviceMesh) -> None:
    """Distribute the experts over the ranks, in place.

    Args:
        model: A transformers model, the same on all ranks of the mesh.
        mesh: One-dimensional.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    apply_expert_parallelism(model, mesh, mesh, expert_plan(model, mesh.size()))


def _resolve(model: Any, size: int, experts: bool) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    return model._resolve_parallel_plans(DistributedConfig(tp_size=size, ep_size=size if experts else 1))


def _plans_of(model: Any) -> dict[str, str]:
    return {**(getattr(model, "tp_plan", None) or {}), **(getattr(model, "ep_plan", None) or {})}


def _check_heads(model: Any, size: int) -> None:
    config = model.config.get_text_config()
    uneven = [f"{name}={heads}" for name in HEADS if (heads := getattr(config, name, None)) and heads % size]
    if uneven:
        raise ValueError(
            f"tp_size={size} does not divide {' and '.join(uneven)} of {type(model).__name__}. Choose a tp_size that "
            "divides the attention heads."
        )
