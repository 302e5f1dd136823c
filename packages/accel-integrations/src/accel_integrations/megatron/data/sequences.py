"""Context parallelism: each rank computes some tokens of every sequence, and attends to the keys and values of all ranks.

megatron-core's own attention does so with Transformer Engine only. This one gathers keys and values (Llama 3,
arXiv 2407.21783, 3.3.2); everything else of megatron-core knows of context parallelism by itself.

Legend: B = samples of a micro-batch, S = sequence length in tokens, C = context-parallel ranks, D = size of a head.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from accel_integrations.megatron.core import load


@dataclass(frozen=True)
class SequenceShares:
    """Which tokens of a sequence each rank computes: chunk r and chunk 2C - 1 - r of 2C.

    Under a causal mask all ranks have equally much to do. megatron-core's rotary embeddings have the same order.

    Args:
        rank, size: The place among context-parallel ranks, and how many there are (C).
    """

    rank: int
    size: int

    @classmethod
    def here(cls) -> SequenceShares:
        """Those of this rank."""
        parallel = load("parallel_state")
        return cls(parallel.get_context_parallel_rank(), parallel.get_context_parallel_world_size())

    @property
    def multiple(self) -> int:
        """What the sequence length must be a multiple of."""
        return 1 if self.size == 1 else 2 * self.size

    def positions(self, rank: int, length: int) -> Tensor:
        """The tokens of one rank in their order, int64 (S / C,)."""
        chunks = torch.arange(length).chunk(2 * self.size)
        return torch.cat([chunks[rank], chunks[-1 - rank]])

    def in_order(self, tokens: Tensor, dim: int) -> Tensor:
        """Tokens of all ranks, which stand one rank after the other along a dimension (S), in the sequence's order."""
        return tokens.index_select(dim, _order(self, tokens.shape[dim], tokens.device))

    def own(self, length: int, device: torch.device) -> Tensor | None:
        """The tokens of this rank, int64 (S / C,); None for all."""
        return None if self.size == 1 else self.positions(self.rank, length).to(device)

    def gather(self, own: Tensor, group: Any) -> Tensor:
        """All tokens in their order, (B, S, ...), from those of each rank, (B, S / C, ...); without gradients."""
        if self.size == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous(), group=group)
        return self.in_order(torch.cat(parts, dim=1), 1)


@lru_cache(maxsize=16)
def _order(shares: SequenceShares, length: int, device: torch.device) -> Tensor:
    """Where each token of the sequence is, if the tokens of all ranks stand one after the other, int64 (S,).

    It is the same in each layer and step, and a copy to a GPU each time would make the host wait.
    """
    with torch.inference_mode(mode=False):  # an evaluation may come first, and training save it for backward
        return torch.cat([shares.positions(rank, length) for rank in range(shares.size)]).argsort().to(device)


class GatheredAttention(nn.Module):
    """Attention of this rank's queries to the keys and values of all context-parallel ranks.

    Args:
        config: megatron-core's configuration.
        attention_dropout: A probability; None for that of the configuration.
        softmax_scale: By which scores are multiplied; None for one over the root of D.
        settings: What megatron-core tells its own attention besides.
    """

    def __init__(
        self,
        config: Any,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._scale = softmax_scale
        self._draws_apart = not config.sequence_parallel  # as megatron-core's attention: each rank for its own heads
        self._shares = SequenceShares.here()
        self._group = load("parallel_state").get_context_parallel_group()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *others: Any, **settings: Any
    ) -> Tensor:
        """The output of the heads of this rank, (S / C, B, heads * D).

        Args:
            query: (S / C, B, heads, D).
            key: (S / C, B, heads of keys and values, D).
            value: As `key`.
            attention_mask: True where a token of this rank does not see another, bool (B, 1, S / C, S).
            *others: The kind of the mask, which says less than the mask.
            **settings: What megatron-core tells its own attention besides.
        """
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, *self._of_all_ranks(key, value)))
        hidden = torch.zeros_like(attention_mask, dtype=query.dtype)
        hidden.masked_fill_(attention_mask, torch.finfo(query.dtype).min)  # not -inf: padding may see nothing
        draws = load("tensor_parallel.random").get_cuda_rng_tracker().fork() if self._draws_apart else nullcontext()
        with draws:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=hidden,
                dropout_p=self._dropout if self.training else 0.0,
                scale=self._scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _of_all_ranks(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of all tokens in their order, (S, B, heads of keys and values, D); gradients are summed."""
        gather = load("tensor_parallel.mappings").gather_from_sequence_parallel_region
        both = self._shares.in_order(gather(torch.cat([key, value], dim=-1), group=self._group), 0)
        return both.split([key.shape[-1], value.shape[-1]], dim=-1)
