"""T5 in megatron-core's terms: an encoder and a decoder, with a bias by relative position in attention."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accel_integrations.megatron.core import load
from accel_integrations.megatron.data.tasks import SequenceToSequence
from accel_integrations.megatron.families.chunk import Norm, Stage
from accel_integrations.megatron.families.shape import ModelShape, Row, activation, sizes_of, weights_of
from accel_integrations.megatron.weights.layouts import (
    COLUMNS,
    ROWS,
    GateAndUp,
    QueryKeyValue,
    Vocabulary,
    Weight,
)

BIAS = "relative_attention_bias"


def t5(config: Any) -> ModelShape:
    """T5, also 1.1, and MT5: RMSNorm, no biases, attention without a scale.

    Args:
        config: Of a Hugging Face model.

    Raises:
        ValueError: The configuration has something that megatron-core lacks.
    """
    tied = bool(config.tie_word_embeddings)
    is_gated = bool(config.is_gated_act)
    return ModelShape(
        **sizes_of(config) | {"num_layers": config.num_decoder_layers, "head_size": config.d_kv},
        mlp_size=config.d_ff,
        max_length=sys.maxsize,
        attention_dropout=config.dropout_rate,
        hidden_dropout=config.dropout_rate,
        window=None,
        activation=activation(config.dense_act_fn),
        layers={
            "normalization": "RMSNorm",
            "layernorm_epsilon": config.layer_norm_epsilon,
            "add_bias_linear": False,
            "gated_linear_unit": is_gated,
            "softmax_scale": 1.0,
        },
        model={
            "position_embedding_type": "relative",
            "encoder_layers": config.num_layers,
            "scales_output": bool(getattr(config, "scale_decoder_outputs", tied and config.model_type == "t5")),
            "relative_attention_num_buckets": config.relative_attention_num_buckets,
            "relative_attention_max_distance": config.relative_attention_max_distance,
        },
        weights=partial(_weights, encoder_layers=config.num_layers, is_gated=is_gated),
        task=SequenceToSequence(config.decoder_start_token_id, config.pad_token_id),
        chunk=t5_chunk,
        takes_pipelines=False,
    )


def _weights(shape: ModelShape, num_rows: int, encoder_layers: int, is_gated: bool) -> list[Weight]:
    rows = Vocabulary(shape.num_tokens, num_rows)
    qkv = QueryKeyValue(shape.heads, shape.groups, shape.head_size)
    kv = QueryKeyValue(0, shape.groups, shape.head_size)
    attention = [
        Row("input_layernorm", "0.layer_norm"),
        Row("self_attention.linear_qkv", "0.SelfAttention.q 0.SelfAttention.k 0.SelfAttention.v", qkv),
        Row("self_attention.linear_proj", "0.SelfAttention.o", COLUMNS),
    ]
    crossing = [
        Row("pre_cross_attn_layernorm", "1.layer_norm"),
        Row("cross_attention.linear_q", "1.EncDecAttention.q", ROWS),
        Row("cross_attention.linear_kv", "1.EncDecAttention.k 1.EncDecAttention.v", kv),
        Row("cross_attention.linear_proj", "1.EncDecAttention.o", COLUMNS),
    ]
    weights = [*weights_of([Row("embedding.word_embeddings", "shared", rows)])]
    for block, count in (("encoder", encoder_layers), ("decoder", shape.num_layers)):
        last, crosses = ("1.", []) if block == "encoder" else ("2.", crossing)
        dense = f"{last}DenseReluDense."
        first = (f"{dense}wi_0 {dense}wi_1", GateAndUp()) if is_gated else (f"{dense}wi", ROWS)
        layer = [
            *attention,
            *crosses,
            Row("pre_mlp_layernorm", f"{last}layer_norm"),
            Row("mlp.linear_fc1", *first),
            Row("mlp.linear_fc2", f"{dense}wo", COLUMNS),
        ]
        bias = Row(f"{block}_relative_pos_emb.{BIAS}", f"{block}.block.0.layer.0.SelfAttention.{BIAS}")
        weights += weights_of([bias])
        for number in range(count):
            weights += weights_of(layer, f"{block}.layers.{number}.", f"{block}.block.{number}.layer.")
        weights += weights_of([Row(f"{block}.final_layernorm", f"{block}.final_layer_norm")])
    return [*weights, *weights_of([Row("lm_head.output_layer", "shared" if shape.tied else "lm_head", rows)])]


# ---- the chunk ------------------------------------------------------------------------------------------------------


def t5_chunk(shape: ModelShape, config: Any, stage: Stage, num_rows: int) -> Any:
    """All of a T5; see `shape.Chunk`. `shape.model` says what the configuration does not."""
    options = dict(shape.model)
    encoder_layers, scales_output = options.pop("encoder_layers"), options.pop("scales_output")
    encoder_config = copy.copy(config)
    encoder_config.num_layers = encoder_layers
    specs = load("models.T5.t5_spec")
    chunk = load("models.T5.t5_model").T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=_layers(specs.encoder_model_with_local_spec(), encoder_layers, crosses=False),
        transformer_decoder_layer_spec=_layers(specs.decoder_model_with_local_spec(), config.num_layers, crosses=True),
        vocab_size=num_rows,
        max_sequence_length=shape.max_length,
        pre_process=stage.is_first,
        post_process=stage.is_last,
        share_embeddings_and_output_weights=shape.tied,
        **options,
    )
    chunk.lm_head.output_layer.bias = None  # which megatron-core adds to tied embeddings
    if scales_output:
        _scale_inputs(chunk.lm_head, config.hidden_size**-0.5)
    for block, positions in (
        (chunk.encoder, chunk.encoder_relative_pos_emb),
        (chunk.decoder, chunk.decoder_relative_pos_emb),
    ):
        for layer in block.layers:
            layer.self_attention.core_attention.__dict__["positions"] = positions  # no submodule: it has one place
        _drop_out(block, config)
    return chunk


def _layers(layer: Any, count: int, *, crosses: bool) -> Any:
    """A stack of layers, with our norms, and attention that takes a bias; `crosses` if they attend to another sequence."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = _biased_attention()
    if crosses:
        parts.pre_cross_attn_layernorm = Norm
    block = load("transformer.transformer_block")
    return block.TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


@cache
def _biased_attention() -> type:
    core, layers = load("transformer.dot_product_attention"), load("tensor_parallel")

    class BiasedAttention(core.DotProductAttention):  # type: ignore[name-defined]
        """Attention whose scores have a bias, which megatron-core's local one refuses.

        Attributes:
            positions: Computes the bias of all heads.
        """

        positions: Any

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> Tensor:
            """Attend.

            Args:
                query: (Q, B, N, D).
                key: (K, B, N, D).
                value: (K, B, N, D).
                attention_mask: Which tokens are hidden, bool, broadcast to (B, N, Q, K).
                attn_mask_type: Not used: the mask says it all.
                attention_bias: Added to the scores, (1, N, Q, K).
                packed_seq_params: Not used.

            Returns:
                (Q, B, N * D).
            """
            if self.config.recompute_granularity is not None:
                attention_bias = self._bias(len(query), len(key))
            scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * self.softmax_scale + attention_bias
            weights = self.scale_mask_softmax(scores, attention_mask, self.softmax_offset)
            with nullcontext() if self.config.sequence_parallel else layers.get_cuda_rng_tracker().fork():
                weights = self.attention_dropout(weights)
            return torch.einsum("bnqk,kbnd->qbnd", weights, value).flatten(2)

        def _bias(self, queries: int, keys: int) -> Tensor:
            """The bias of this rank's heads, computed anew, because checkpoints of activations stop its gradients."""
            of_heads_last = self.positions(queries, keys).permute(0, 2, 3, 1)
            bias: Tensor = layers.scatter_to_tensor_model_parallel_region(of_heads_last, self.tp_group)
            return bias.permute(0, 3, 1, 2)

    return BiasedAttention


def _scale_inputs(module: Any, factor: float) -> None:
    def scale(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * factor, *inputs[1:])

    module.register_forward_pre_hook(scale)


def _drop_out(block: Any, config: Any) -> None:
    """Dropout where T5 has it and megatron-core's layers do not: within the MLPs, and after the last norm."""
    tracker = load("tensor_parallel").get_cuda_rng_tracker

    def within(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # under sequence parallelism the whole block draws what is this rank's own
        with nullcontext() if config.sequence_parallel else tracker().fork():
            return (F.dropout(inputs[0], config.hidden_dropout, module.training), *inputs[1:])

    def after(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.dropout(output, config.hidden_dropout, module.training)

    for layer in block.layers:
        layer.mlp.linear_fc2.register_forward_pre_hook(within)
    block.final_layernorm.register_forward_hook(after)
