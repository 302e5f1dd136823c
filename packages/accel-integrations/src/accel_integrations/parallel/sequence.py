"""Sequence parallelism (Ulysses): each rank of the "sp" dimension holds a shard of every sequence.

An all-to-all around attention, and only there, gives every rank full sequences for some of the attention heads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from accel_integrations.parallel.causal_masks import (
    check_causal_batches,
    check_no_mask,
    drop_masks,
    tokens_in_order,
    transformers_models,
)
from accel_integrations.parallel.patched_attention import Attention, AttentionPatch, check_attention, watch_attention
from accel_integrations.parallel.transform import Transform
from accel_integrations.parallel.transformers_plan import is_transformers_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig

SETTING = 'Sequence parallelism (sp_backend="torch")'


@final
class SequenceParallel(Transform):
    """Puts all-to-alls around every `scaled_dot_product_attention` of the model, without DeepSpeed."""

    axis = "sp"

    @classmethod
    @override
    def is_wanted(cls, config: ParallelismConfig) -> bool:
        """Whether the axis is in use and not DeepSpeed's."""
        return config.sp_enabled and config.sp_backend == "torch"

    @override
    def check(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Check that the model uses `scaled_dot_product_attention`, and that its heads can be split evenly.

        Raises:
            ValueError: One of them is not so; the message names it.
        """
        size = mesh[self.axis].size()
        check_attention(model, f"sp_size={size}")
        heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
        if is_transformers_model(model) and isinstance(heads, int) and heads % (size * self.config.tp_size):
            raise ValueError(_uneven(heads, size * self.config.tp_size))

    @override
    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Patch the attention of all modules, also where activation checkpointing recomputes it in backward."""
        group = mesh[self.axis].get_group()
        patch = AttentionPatch(lambda attention: ulysses_attention(attention, group))
        check_causal_batches(model, SETTING, partial(tokens_in_order, group))
        drop_masks(model, lambda: True)
        of_transformers = list(transformers_models(model))
        for inner in of_transformers:
            inner.register_forward_pre_hook(_labels_that_are_shifted, with_kwargs=True)
        for inner in of_transformers or [model]:
            inner.register_forward_pre_hook(_without_padding_mask, with_kwargs=True)
        watch_attention(model, patch, SETTING)  # its last hook must run before the patch ends
        for module in model.modules():
            if module is model or any(True for _ in module.children()):
                module.register_forward_pre_hook(lambda *_: patch.enter())
                module.register_forward_hook(lambda *_: patch.leave(), always_call=True)
        return model


def _without_padding_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Padding is at the end of sequences, where causal attention needs no mask for it."""
    if getattr(kwargs.get("attention_mask"), "ndim", 0) == 2:
        return args, {name: value for name, value in kwargs.items() if name != "attention_mask"}
    return None


def _labels_that_are_shifted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transformers computes a loss only where there are labels; which ones it uses is in `shift_labels`."""
    if kwargs.get("shift_labels") is not None and kwargs.get("labels") is None:
        return args, {**kwargs, "labels": kwargs["shift_labels"]}
    return None


def ulysses_attention(attention: Attention, group: Any) -> Attention:
    """Attention over full sequences, for ranks that hold shards of them.

    Args:
        attention: `scaled_dot_product_attention`, or a function with its signature.
        group: The process group; rank i holds shard i of the sequences.

    Returns:
        A function of queries, keys and values of shape (batch, heads, local sequence length, features).
    """
    size = dist.get_world_size(group)

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        check_no_mask(attn_mask, SETTING)
        heads = query.shape[1] if query.ndim == 4 else 0
        if heads == 0 or heads % size:
            raise ValueError(_uneven(heads, size) if heads else f"{SETTING} needs queries of 4 dimensions.")
        if key.shape[1] % size:  # fewer key heads than ranks: each gets those of its queries
            key, value = (states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value))
            enable_gqa = False
        full = _sequence_to_heads([query, key, value], size, group)
        output = attention(*full, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return _heads_to_sequence(output, size, group)

    return attend


def _sequence_to_heads(tensors: list[torch.Tensor], size: int, group: Any) -> list[torch.Tensor]:
    """From local sequences of all heads to full sequences of local heads, in one all-to-all where the sizes allow it."""
    if len({tensor.shape[2:] for tensor in tensors}) > 1:
        return [_sequence_to_heads([tensor], size, group)[0] for tensor in tensors]
    batch, _, length, features = tensors[0].shape
    own_heads = [tensor.shape[1] // size for tensor in tensors]
    by_rank = [
        tensor.reshape(batch, size, heads, length, features) for tensor, heads in zip(tensors, own_heads, strict=True)
    ]
    received = _AllToAll.apply(torch.cat(by_rank, dim=2).transpose(0, 1), group)
    joined = received.permute(1, 2, 0, 3, 4).reshape(batch, sum(own_heads), size * length, features)
    return list(joined.split(own_heads, dim=1))


def _heads_to_sequence(output: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """From full sequences of local heads back to local sequences of all heads."""
    batch, heads, length, features = output.shape
    by_rank = output.reshape(batch, heads, size, length // size, features).permute(2, 0, 1, 3, 4)
    received = _AllToAll.apply(by_rank, group)
    return received.transpose(0, 1).reshape(batch, size * heads, length // size, features)


class _AllToAll(torch.autograd.Function):
    """Sends row i of the first dimension to rank i of the group; gradients take the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        sent = rows.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None


def _uneven(heads: int, size: int) -> str:
    return (
        f"{SETTING} cannot split {heads} attention heads evenly over {size} ranks. Choose a size that divides the "
        "heads, or use cp_size instead."
    )
