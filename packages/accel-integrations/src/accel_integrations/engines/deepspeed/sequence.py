"""Sequences shared between processes by DeepSpeed (Ulysses, ALST; https://arxiv.org/abs/2506.13996)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from accel_state.mesh import ParallelismConfig


def shares_sequences(config: ParallelismConfig | None) -> bool:
    """Whether DeepSpeed is asked to share sequences between processes."""
    return config is not None and config.sp_enabled and config.sp_backend == "deepspeed"


def register_attention(model: nn.Module, config: ParallelismConfig, micro_batch: int) -> Any:
    """Have a model of transformers trade heads for sequences around its attention.

    Args:
        model: Built with the attention that `sp_attn_implementation` names.
        config: With `sp_size` and its handler.
        micro_batch: Samples per process and batch.

    Returns:
        What `deepspeed.initialize` takes as `mpu`: the groups of processes.

    Raises:
        ValueError: For a model that is not one of transformers.
    """
    if not hasattr(model, "config"):
        raise ValueError(
            f"sp_size={config.sp_size} with sp_backend='deepspeed' shares the sequences of models of transformers, which "
            f"{type(model).__name__} is not: it has no config. Choose sp_backend='torch' without DeepSpeed."
        )
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    handler: Any = config.sp_handler
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=handler.sp_attn_implementation,
        sequence_parallel_size=config.sp_size,
        micro_batch_size=micro_batch,
        seq_length=handler.sp_seq_length,
        seq_length_is_variable=handler.sp_seq_length_is_variable,
    )


class SharedBatches:
    """Hands out this process's part of the sequences of every batch of its group, one batch after another.

    Args:
        loader: Prepared; its batches are dictionaries with `input_ids`, `labels` and `position_ids`, each of shape
            (batch, sequence). `labels` come out as `shift_labels`. Other attributes are those of this loader.
        device: Where batches are exchanged and handed out.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
        from deepspeed.utils import groups

        self.loader = loader
        self.device = device
        self._parts = UlyssesSPDataLoaderAdapter(
            loader,
            sp_rank=groups._get_sequence_parallel_rank(),
            sp_group=groups._get_sequence_parallel_group(),
            sp_world_size=groups._get_sequence_parallel_world_size(),
            device=device,
        )

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield {name: self._whole(value) for name, value in part.items()}

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _whole(self, value: Any) -> Any:
        """DeepSpeed cuts views out of sequences, on the CPU."""
        return value.to(self.device).contiguous() if isinstance(value, torch.Tensor) else value
