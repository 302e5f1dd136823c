"""Where a chunk of a model stands in the pipeline, and the norm in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Stage:
    """Where a chunk stands.

    Args:
        virtual: The number of the virtual pipeline stage; None without these.
        is_first, is_last: Whether it has the embeddings, and whether it has the head.
    """

    virtual: int | None
    is_first: bool
    is_last: bool

    def options(self) -> dict[str, Any]:
        """The same as arguments of megatron-core's models."""
        return {"pre_process": self.is_first, "post_process": self.is_last, "vp_stage": self.virtual}


class Norm:
    """Makes torch's norms as megatron-core asks for them, also under sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """The norm that the configuration names, whose gradients are summed over ranks with other tokens."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
