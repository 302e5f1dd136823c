"""T5 in megatron-core's terms: an encoder and a decoder, with a bias by relative position in attention."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from accel_integrations.engines.megatron.layouts import GateAndUp, Layout, Plain, QueryKeyValue, Vocabulary
from accel_integrations.engines.megatron.shape import ModelShape, Weight
from accel_integrations.engines.megatron.supported import activation
from accel_integrations.engines.megatron.t5_chunk import t5_chunk
from accel_integrations.engines.megatron.tasks import SequenceToSequence

BIAS = "relative_attention_bias.weight"


def t5(config: Any) -> ModelShape:
    """T5, also 1.1: RMSNorm, no biases, attention without a scale.

    Args:
        config: Of a Hugging Face model.

    Raises:
        ValueError: The configuration has something that megatron-core lacks.
    """
    tied = bool(config.tie_word_embeddings)
    is_gated = bool(config.is_gated_act)
    return ModelShape(
        num_layers=config.num_decoder_layers,
        hidden_size=config.d_model,
        heads=config.num_heads,
        groups=config.num_heads,
        head_size=config.d_kv,
        mlp_size=config.d_ff,
        num_tokens=config.vocab_size,
        max_length=sys.maxsize,
        tied=tied,
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
            "encoder_layers": config.num_layers,
            "scales_output": bool(getattr(config, "scale_decoder_outputs", tied)),
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
    weights = [Weight("embedding.word_embeddings.weight", ("shared.weight",), rows)]

    def add(ours: str, layout: Layout, *theirs: str) -> None:
        weights.append(Weight(f"{ours}.weight", tuple(f"{one}.weight" for one in theirs), layout))

    for block, count in (("encoder", encoder_layers), ("decoder", shape.num_layers)):
        bias = f"{block}.block.0.layer.0.SelfAttention.{BIAS}"
        weights.append(Weight(f"{block}_relative_pos_emb.{BIAS}", (bias,), Plain()))
        for number in range(count):
            ours, theirs = f"{block}.layers.{number}.", f"{block}.block.{number}.layer."
            add(ours + "input_layernorm", Plain(), theirs + "0.layer_norm")
            add(ours + "self_attention.linear_qkv", qkv, *(f"{theirs}0.SelfAttention.{one}" for one in "qkv"))
            add(ours + "self_attention.linear_proj", Plain(1), theirs + "0.SelfAttention.o")
            last = theirs + "1."
            if block == "decoder":
                add(ours + "pre_cross_attn_layernorm", Plain(), theirs + "1.layer_norm")
                add(ours + "cross_attention.linear_q", Plain(0), theirs + "1.EncDecAttention.q")
                add(ours + "cross_attention.linear_kv", kv, *(f"{theirs}1.EncDecAttention.{one}" for one in "kv"))
                add(ours + "cross_attention.linear_proj", Plain(1), theirs + "1.EncDecAttention.o")
                last = theirs + "2."
            add(ours + "pre_mlp_layernorm", Plain(), last + "layer_norm")
            dense = last + "DenseReluDense."
            if is_gated:
                add(ours + "mlp.linear_fc1", GateAndUp(), dense + "wi_0", dense + "wi_1")
            else:
                add(ours + "mlp.linear_fc1", Plain(0), dense + "wi")
            add(ours + "mlp.linear_fc2", Plain(1), dense + "wo")
        add(f"{block}.final_layernorm", Plain(), f"{block}.final_layer_norm")
    add("lm_head.output_layer", rows, "shared" if shape.tied else "lm_head")
    return weights
