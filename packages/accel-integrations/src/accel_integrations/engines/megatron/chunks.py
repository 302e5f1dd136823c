"""The chunks of which a rank's part of a model consists, out of megatron-core's local layers: GPT's and BERT's.

Each function here has the arguments of `Chunk`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accel_integrations.engines.megatron.context import GatheredAttention
from accel_integrations.engines.megatron.library import load


class Sizes(Protocol):
    """What chunks need of a `ModelShape`."""

    @property
    def max_length(self) -> int:
        """The longest sequence in tokens."""
        ...

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are one tensor."""
        ...

    @property
    def activation(self) -> Callable[..., Any]:
        """The function of the MLP."""
        ...

    @property
    def model(self) -> Mapping[str, Any]:
        """Further arguments of the class that is built."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a chunk stands.

    Args:
        stage: The number of the virtual pipeline stage; None without these.
        is_first, is_last: Whether it has the embeddings, and whether it has the head.
    """

    stage: int | None
    is_first: bool
    is_last: bool


Chunk = Callable[[Any, Any, Place, int], Any]
"""Makes a chunk of a model, for megatron-core's configuration, a place, and a number of rows of the embeddings."""


class Norm:
    """Makes torch's norms as megatron-core asks for them, also under sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """The norm that the configuration names, whose gradients are summed over ranks with other tokens."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class AddThenNorm(nn.Module):
    """Dropout, the residual, and a norm after them, as in BERT, where megatron-core's layers have a norm before."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, eps=eps)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function that megatron-core calls after attention, and after the MLP."""

        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
            output, bias = output_with_bias
            output = output if bias is None else output + bias
            hidden_states: Tensor = self.norm(residual + nn.functional.dropout(output, probability, training))
            return hidden_states

        return add


class NoTransform(nn.Module):
    """Stands for what precedes the output layer in a model that classifies sequences."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The first tokens, which nobody uses."""
        return hidden_states[:1].detach()


class NoTokens(nn.Module):
    """Stands for the output layer over the vocabulary in a model that classifies sequences."""

    def forward(self, hidden_states: Tensor, weight: Any = None) -> tuple[Tensor, None]:
        """What it gets."""
        return hidden_states, None


def gpt_chunk(shape: Sizes, config: Any, place: Place, num_rows: int) -> Any:
    """A chunk of a decoder."""
    return load("models.gpt.gpt_model").GPTModel(
        config,
        _gpt_layers(config, place.stage),
        vocab_size=num_rows,
        max_sequence_length=shape.max_length,
        pre_process=place.is_first,
        post_process=place.is_last,
        share_embeddings_and_output_weights=shape.tied,
        vp_stage=place.stage,
        **shape.model,
    )


def _gpt_layers(config: Any, stage: int | None) -> Any:
    """The layers of a chunk, with our norms."""
    specs, block = load("models.gpt.gpt_layer_specs"), load("transformer.transformer_block")
    layer = specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    if config.context_parallel_size > 1:
        attention.core_attention = GatheredAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    count = block.get_num_layers_to_build(config, vp_stage=stage)
    return block.TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


def bert_chunk(shape: Sizes, config: Any, place: Place, num_rows: int) -> Any:
    """A chunk of an encoder: `shape.model` says where its norms are, and which head it has."""
    options = dict(shape.model)
    norm_follows, head = options.pop("norm_follows"), options.pop("head")
    chunk = load("models.bert.bert_model").BertModel(
        config=config,
        transformer_layer_spec=_bert_layer(config, norm_follows=norm_follows),
        vocab_size=num_rows,
        max_sequence_length=shape.max_length,
        pre_process=place.is_first,
        post_process=place.is_last,
        share_embeddings_and_output_weights=shape.tied,
        vp_stage=place.stage,
        **options,
    )
    if norm_follows and place.is_first:
        before = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        chunk.embedding.embedding_dropout = nn.Sequential(before, chunk.embedding.embedding_dropout)
    if place.is_last:
        if norm_follows:
            chunk.encoder.final_layernorm = None
        chunk.lm_head.gelu = shape.activation
        if head is not None:
            chunk.lm_head, chunk.output_layer = NoTransform(), NoTokens()
            chunk.binary_head = nn.Sequential(nn.Dropout(head.dropout), nn.Linear(config.hidden_size, head.num_labels))
    return chunk


@dataclass(frozen=True)
class Classifier:
    """The head of a model that classifies sequences.

    Args:
        num_labels: Its columns.
        dropout: Before it, a probability.
    """

    num_labels: int
    dropout: float


def _bert_layer(config: Any, *, norm_follows: bool) -> Any:
    """A layer of an encoder, with our norms, before attention and MLP or after them."""
    layer = copy.deepcopy(load("models.bert.bert_layer_specs").bert_layer_local_spec)
    parts = layer.submodules
    if not norm_follows:
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        return layer
    parts.input_layernorm = parts.pre_mlp_layernorm = load("transformer.identity_op").IdentityOp
    settings = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
    spec = load("transformer.spec_utils").ModuleSpec
    parts.self_attn_bda = parts.mlp_bda = spec(module=AddThenNorm, params=settings)
    return layer


def hide_padding(num_tokens: int, layer: Any) -> None:
    """Keep rows which only pad the vocabulary out of the softmax.

    Args:
        num_tokens: The rows that are tokens.
        layer: The output layer.
    """
    parallel = load("parallel_state")

    def hide(module: Any, inputs: Any, outputs: Any) -> Any:
        logits, bias = outputs  # (sequence, batch, tokens of this rank)
        first = parallel.get_tensor_model_parallel_rank() * logits.shape[-1]
        padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= num_tokens
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min / 2), bias

    layer.register_forward_hook(hide)
