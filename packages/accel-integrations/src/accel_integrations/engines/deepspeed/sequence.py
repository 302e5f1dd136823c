"""DeepSpeed's sequence parallelism (Ulysses, ALST; https://arxiv.org/abs/2506.13996)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_integrations.parallel.causal_masks import check_causal_batches, tokens_in_order
from accel_integrations.parallel.patched_attention import check_no_recurrent_layers, check_outputs_of_tokens

if TYPE_CHECKING:
    from accel_state.mesh import ParallelismConfig


def uses_ulysses(config: ParallelismConfig | None) -> bool:
    """Whether the run uses DeepSpeed's sequence parallelism."""
    return config is not None and config.sp_enabled and config.sp_backend == "deepspeed"


@dataclass(frozen=True)
class UlyssesAttention:
    """An attention function of transformers that DeepSpeed has replaced by one with all-to-alls around it.

    Attributes:
        groups: The `mpu` argument of `deepspeed.initialize`.
        name: The name of the attention in transformers.
        original: The function that was replaced.
    """

    groups: Any
    name: str
    original: Any

    @classmethod
    def register(cls, model: nn.Module, config: ParallelismConfig, micro_batch: int) -> UlyssesAttention:
        """Replace the attention; it stays replaced for all models with the same attention, until `restore`.

        Args:
            model: Of transformers, built with the attention that `sp_attn_implementation` names.
            config: With `sp_size` and its handler.
            micro_batch: Micro-batch size (samples per rank).

        Raises:
            ValueError: For a model that is not of transformers, or has layers that cannot work on a shard of a
                sequence.
        """
        if not hasattr(model, "config"):
            raise ValueError(
                f"sp_size={config.sp_size} with sp_backend='deepspeed' shards sequences only for models of "
                f"transformers, but {type(model).__name__} has no config. Choose sp_backend='torch' without DeepSpeed."
            )
        check_no_recurrent_layers(model, f"sp_size={config.sp_size}")
        check_outputs_of_tokens(model, f"sp_size={config.sp_size}")
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        handler: Any = config.sp_handler
        name = handler.sp_attn_implementation
        original = ALL_ATTENTION_FUNCTIONS.get(name)
        groups = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=name,
            sequence_parallel_size=config.sp_size,
            micro_batch_size=micro_batch,
            seq_length=handler.sp_seq_length,
            seq_length_is_variable=handler.sp_seq_length_is_variable,
        )
        replaced, group = ALL_ATTENTION_FUNCTIONS.get(name), groups.get_sequence_parallel_group()
        if name == "sdpa":  # flash attention reads windows from the model, and packed samples from position_ids
            check_causal_batches(
                model,
                'Sequence parallelism (sp_backend="deepspeed")',
                lambda length: (
                    tokens_in_order(group, length) if ALL_ATTENTION_FUNCTIONS.get(name) is replaced else None
                ),
                'Choose sp_backend="torch" without DeepSpeed',
            )
        return cls(groups, name, original)

    def restore(self) -> None:
        """Restore the attention of transformers, for models of another run in this process."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self.original is not None:
            ALL_ATTENTION_FUNCTIONS[self.name] = self.original


class UlyssesBatches:
    """Yields this rank's shard of the sequences of every batch of its sequence parallel group, one batch after another.

    Args:
        loader: Prepared; its batches are dictionaries with `input_ids`, `labels` and `position_ids`, each of shape
            (batch, sequence). `labels` come out as `shift_labels`. Other attributes are those of this loader.
        device: The device of the collectives, and of the batches that are yielded.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
        from deepspeed.utils import groups

        self.loader = loader
        self.device = device
        self._shards = UlyssesSPDataLoaderAdapter(
            loader,
            sp_rank=groups._get_sequence_parallel_rank(),
            sp_group=groups._get_sequence_parallel_group(),
            sp_world_size=groups._get_sequence_parallel_world_size(),
            device=device,
        )

    def __len__(self) -> int:
        return len(self._shards)

    def __iter__(self) -> Iterator[Any]:
        for shard in self._shards:
            yield {name: self._on_device(value) for name, value in shard.items()}

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _on_device(self, value: Any) -> Any:
        """A contiguous tensor on the device: DeepSpeed yields views of the full sequences, on the CPU."""
        return value.to(self.device).contiguous() if isinstance(value, torch.Tensor) else value
