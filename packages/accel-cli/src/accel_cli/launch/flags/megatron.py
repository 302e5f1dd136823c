"""Options of Megatron-LM."""

from __future__ import annotations

from typing import Any

from accel_cli.arguments import Option, truth
from accel_cli.launch.flags.group import OptionGroup


def _row(name: str, help: str, **rest: Any) -> Option:
    flag = f"--megatron_lm_{name}"
    return Option(flag, help, environment=f"MEGATRON_LM_{name.upper()}", **{"metavar": "VALUE", **rest})


_number: dict[str, Any] = {"type": int, "metavar": "N"}
_share: dict[str, Any] = {"type": float, "metavar": "X"}
_no: dict[str, Any] = {"type": truth, "default": False, "metavar": "BOOL"}

MEGATRON_LM = OptionGroup(
    "Megatron-LM Arguments",
    (
        _row("tp_degree", "Processes that share one layer.", default=1, **_number),
        _row("use_custom_fsdp", "Use Megatron's own sharded data parallelism.", **_no),
        _row("no_load_optim", "Do not load the optimizer with a checkpoint.", **_no),
        _row("eod_mask_loss", "Leave end-of-document tokens out of the loss.", **_no),
        _row("overlap_cpu_optimizer_d2h_h2d", "Copy optimizer states while computing.", **_no),
        _row("no_save_optim", "Do not save the optimizer with a checkpoint.", **_no),
        _row("optimizer_cpu_offload", "Keep optimizer states in CPU memory.", **_no),
        _row("use_precision_aware_optimizer", "Keep optimizer states in lower precision.", **_no),
        _row("decoder_last_pipeline_num_layers", "Layers of the last pipeline stage.", **_number),
        _row("pp_degree", "Pipeline stages.", default=1, **_number),
        _row("num_micro_batches", "Micro-batches per pipeline step.", **_number),
        _row("sequence_parallelism", "Share the sequence among tensor-parallel processes: true or false."),
        _row("recompute_activations", "Compute activations again in the backward pass: true or false."),
        _row("use_distributed_optimizer", "Shard the optimizer among data-parallel processes: true or false."),
        _row("gradient_clipping", "Largest norm of the gradient; 0 for none.", default=1.0, **_share),
        _row("recompute_granularity", "What to compute again: full or selective."),
        _row("recompute_method", "How to choose the layers: uniform or block."),
        _row("recompute_num_layers", "How many layers.", **_number),
        _row("attention_backend", "Attention implementation."),
        _row("expert_model_parallel_size", "Processes that share the experts.", **_number),
        _row("context_parallel_size", "Processes that share the sequence.", **_number),
        _row("attention_dropout", "Dropout in the attention.", **_share),
        _row("hidden_dropout", "Dropout in the hidden state.", **_share),
        _row("attention_softmax_in_fp32", "Softmax of the attention in float32: true or false."),
        _row("expert_tensor_parallel_size", "Processes that share one expert.", **_number),
        _row("calculate_per_token_loss", "Scale the loss by the number of tokens: true or false."),
        _row("use_rotary_position_embeddings", "Rotary position embeddings: true or false."),
    ),
    shown_with="--use_megatron_lm",
    handed_when=lambda settings: settings.use_megatron_lm,
    announced_by="ACCELERATE_USE_MEGATRON_LM",
)
