"""Context parallelism (ring attention): each rank of the "cp" dimension holds a shard of every sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

import torch
from typing_extensions import override

from accel_integrations.parallel.buffers import check_buffers
from accel_integrations.parallel.causal_masks import HeldTokens, check_causal_batches, check_no_mask, drop_masks
from accel_integrations.parallel.patched_attention import Attention, AttentionPatch, check_attention, watch_attention
from accel_integrations.parallel.torch_ring import forgotten_afterwards, restored_after_errors, ring_attention
from accel_integrations.parallel.transform import Transform

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


SETTING = "Context parallelism (cp_size)"
INSTEAD = "Choose sp_size instead of cp_size"


def _checked(attention: Attention) -> Attention:
    """Torch's context parallel attention, with readable errors for unsupported arguments."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        check_no_mask(attn_mask, SETTING)
        if query.shape[-1] != value.shape[-1]:
            raise ValueError(
                f"{SETTING} needs queries and values of one width, but got {query.shape[-1]} and {value.shape[-1]} features, as of "
                f"latent attention. {INSTEAD}."
            )
        if dropout_p > 0 and query.device.type == "cpu":
            raise ValueError(
                f"{SETTING} does not support attention dropout on the CPU, but got dropout_p={dropout_p!r}. Set the "
                "model's attention dropout to 0."
            )
        if not is_causal and _options().enable_load_balance:
            raise ValueError(
                f"{SETTING} got attention without a causal mask, for which load balancing (an early and a late chunk "
                "of each sequence per rank) is not possible. Set TorchContextParallelConfig(cp_load_balance=False)."
            )
        return attention(query, key, value, dropout_p=dropout_p, is_causal=is_causal, **options)

    return attend


ATTENTION = AttentionPatch(_checked)
HELD_TOKENS: ContextVar[HeldTokens | None] = ContextVar("held_tokens", default=None)
"""What this rank holds within a block."""


@final
class ContextParallel(Transform):
    """Makes a model ready for blocks of `Accelerator.maybe_context_parallel`, in which it gets shards of sequences."""

    axis = "cp"

    @override
    def check(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Check that the model uses `scaled_dot_product_attention`.

        Raises:
            ValueError: It uses another attention, which the message names.
        """
        check_attention(model, f"cp_size={self.config.cp_size}")

    @override
    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Have the model drop causal masks, and raise an error for others and for attention that is not the patched one."""
        check_causal_batches(model, SETTING, lambda length: HELD_TOKENS.get(), INSTEAD)
        drop_masks(model, lambda: ATTENTION.is_active)
        watch_attention(model, ATTENTION, SETTING)
        return model

    @override
    @contextmanager
    def sharded(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> Iterator[None]:
        """A context in which buffers are shards of torch's ring attention, which takes the place of attention in it."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        handler, mesh = self.config.cp_handler, self.config.axis_mesh(self.axis)
        assert handler is not None
        assert mesh is not None
        tensors, along = check_buffers(buffers, dims, no_restore, "cp_size", mesh.size())
        if mesh.device_type == "cpu":
            from accel_integrations.parallel.ring_cpu import register

            register()
        set_rotate_method(handler.cp_comm_strategy or "allgather")
        length = tensors[0].shape[along[0]]
        _options().enable_load_balance = handler.cp_load_balance and length % (2 * mesh.size()) == 0
        tokens = torch.arange(length, device=tensors[0].device)
        parallel = context_parallel(
            mesh,
            buffers=[*tensors, tokens],
            buffer_seq_dims=[*along, 0],
            no_restore_buffers={tokens, *(no_restore or ())},
        )
        with forgotten_afterwards(), restored_after_errors(), parallel, ATTENTION.block():
            before = HELD_TOKENS.set(HeldTokens(mesh.get_group(), tokens))
            try:
                yield
            finally:
                HELD_TOKENS.reset(before)


def _options() -> Any:
    return ring_attention()._cp_options
