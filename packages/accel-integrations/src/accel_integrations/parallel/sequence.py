"""Sequence parallelism (Ulysses): each rank of the "sp" dimension holds a shard of every sequence.

An all-to-all around attention, and only there, gives every rank full sequences for some of the attention heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_data.sequence_shard import length_of_full
from accel_integrations.parallel.buffers import check_buffers
from accel_integrations.parallel.causal_masks import check_no_mask
from accel_integrations.parallel.model_attention import check_model, shard_sequences
from accel_integrations.parallel.patched_attention import (
    Attention,
    AttentionPatch,
    check_no_recurrent_layers,
    check_outputs_of_tokens,
    watch_attention,
)
from accel_integrations.parallel.transform import Transform
from accel_integrations.parallel.transformers_plan import transformers_models
from accel_integrations.parallel.ulysses import SETTING, gather_heads, gathered, scatter_heads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig


@final
class SequenceParallel(Transform):
    """Puts all-to-alls around every attention of the model, without DeepSpeed.

    Models of transformers keep their attention function, whichever it is; others call `scaled_dot_product_attention`.
    """

    axis = "sp"

    @classmethod
    @override
    def is_wanted(cls, config: ParallelismConfig) -> bool:
        """Whether the axis is in use and not DeepSpeed's."""
        return config.sp_enabled and config.sp_backend == "torch"

    @override
    def check(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Check that the attention of the model can be split, and that its heads can be split evenly.

        Raises:
            ValueError: One of them is not so; the message names it.
        """
        size = mesh[self.axis].size()
        check_no_recurrent_layers(model, f"sp_size={size}")
        for inner in transformers_models(model):
            check_outputs_of_tokens(inner, f"sp_size={size}")
            check_model(inner, size, size * self.config.tp_size)

    @override
    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Wrap the attention of all modules, also where activation checkpointing recomputes it in backward."""
        group = mesh[self.axis].get_group()
        of_transformers = list(transformers_models(model))
        for inner in of_transformers:
            shard_sequences(inner, group)
        if of_transformers:
            return model
        patch = AttentionPatch(lambda attention: ulysses_attention(attention, group))
        model.register_forward_pre_hook(partial(_without_padding_mask, group), with_kwargs=True)
        watch_attention(model, patch, SETTING)  # its last hook must run before the patch ends
        for module in model.modules():
            if module is model or any(True for _ in module.children()):
                module.register_forward_pre_hook(lambda *_: patch.enter())
                module.register_forward_hook(lambda *_: patch.leave(), always_call=True)
        return model

    @override
    @contextmanager
    def sharded(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> Iterator[None]:
        """A context in which buffers are contiguous shards; what a prepared loader has sharded stays as it is."""
        mesh = self.config.axis_mesh(self.axis)
        assert mesh is not None
        size, rank = mesh.size(), mesh.get_local_rank()
        tensors, along = check_buffers(buffers, dims, no_restore, "sp_size", size)
        unsharded = [
            (tensor, dim) for tensor, dim in zip(tensors, along, strict=True) if length_of_full(tensor) is None
        ]
        for_good = list(no_restore or ())
        # `detach` gives the buffer another tensor object, which keeps the full memory.
        to_restore: list[tuple[Any, torch.Tensor]] = [
            (tensor, tensor.detach()) for tensor, _ in unsharded if all(tensor is not other for other in for_good)
        ]
        buffer: Any
        for buffer, dim in unsharded:
            buffer.set_(buffer.chunk(size, dim)[rank].contiguous())
        try:
            yield
        finally:
            for buffer, full in to_restore:
                buffer.set_(full)


def _without_padding_mask(group: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drop a mask of padding at the end of sequences, for which causal attention needs none."""
    mask: Any = kwargs.get("attention_mask")
    if getattr(mask, "ndim", 0) != 2:
        return None
    full = gathered(mask.long(), group).movedim(0, 1).flatten(1)
    if bool((full[:, 1:] > full[:, :-1]).any()):
        raise ValueError(
            f"{SETTING}: attention_mask masks tokens before others, as where sequences are padded at the beginning, which "
            f"{type(module).__name__} cannot take into account: only models of transformers can. Pad at the end."
        )
    return args, {name: value for name, value in kwargs.items() if name != "attention_mask"}


def ulysses_attention(attention: Attention, group: Any) -> Attention:
    """Attention over full sequences, for ranks that hold shards of them.

    Args:
        attention: `scaled_dot_product_attention`, or a function with its signature.
        group: The process group; rank i holds shard i of the sequences.

    Returns:
        A function of queries, keys and values of shape (batch, heads, local sequence length, features).
    """

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
        if query.ndim != 4:
            raise ValueError(f"{SETTING} needs queries of 4 dimensions, but got {query.ndim}.")
        full = scatter_heads(query, key, value, group)
        enable_gqa = full[1].shape[1] < full[0].shape[1]
        output = attention(*full, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return gather_heads(output, group)

    return attend
