"""What a program's own training step is told of the run, by the names of Megatron-LM's arguments."""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accel_integrations.engines.megatron.tasks import Causal, Classified, Masked, SequenceToSequence
from accel_state.settings.megatron_models import find_parser

if TYPE_CHECKING:
    from torch import nn

    from accel_integrations.engines.megatron.groups import Degrees
    from accel_integrations.engines.megatron.shape import ModelShape
    from accel_state.settings.megatron import MegatronLMPlugin

KINDS = {Causal: "gpt", Masked: "bert", Classified: "bert", SequenceToSequence: "t5"}
"""Megatron-LM's names of kinds of models, by what they read and give."""


def run_arguments(plugin: MegatronLMPlugin, model: nn.Module, shape: ModelShape, degrees: Degrees) -> Namespace:
    """The arguments that `custom_train_step_class` is made with.

    Args:
        plugin: The settings of the run; its own arguments take precedence.
        model: The model of transformers.
        shape: Its sizes.
        degrees: The parallelism degrees.
    """
    config: Any = model.config
    with suppress(ValueError):  # a family that accelerate 1.15 does not know
        find_parser(config.model_type)(plugin, model, None)
    arguments = {
        "world_size": dist.get_world_size(),
        "rank": dist.get_rank(),
        "data_parallel_size": degrees.data,
        "context_parallel_size": degrees.context,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_length,
        "orig_vocab_size": shape.num_tokens,
        "padded_vocab_size": shape.num_rows(degrees),
        "vocab_file": None,
        "eos_token_id": _first(getattr(config, "eos_token_id", None)),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "model_type_name": KINDS[type(shape.task)],
        "model_return_dict": getattr(config, "return_dict", True),
        "pretraining_flag": not isinstance(shape.task, Classified),
        "num_labels": config.num_labels,
        "bert_binary_head": "next_sentence_label" in shape.task.names,
        "return_logits": False,  # losses alone are computed in training
    }
    return Namespace(**plugin.megatron_lm_default_args | arguments | (plugin.other_megatron_args or {}))


def _first(tokens: int | list[int] | None) -> int | None:
    """The token that ends a text; of several, the first."""
    return tokens[0] if isinstance(tokens, list) else tokens
