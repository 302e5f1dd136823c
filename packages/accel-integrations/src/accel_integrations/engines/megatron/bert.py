"""BERT in megatron-core's terms: with norms after attention and MLP (`bert`), or before them (`megatron-bert`)."""

from __future__ import annotations

from functools import partial
from typing import Any

from accel_integrations.engines.megatron.chunks import Classifier, bert_chunk
from accel_integrations.engines.megatron.layouts import Layout, Plain, QueryKeyValue, Vocabulary
from accel_integrations.engines.megatron.shape import ModelShape, Weight
from accel_integrations.engines.megatron.supported import activation, lacks
from accel_integrations.engines.megatron.tasks import Classified, Masked, Task

NAMES = {  # of layers, by megatron-core's: for `bert`, and for `megatron-bert`
    "input_layernorm": (None, "attention.ln"),
    "self_attention.linear_proj": ("attention.output.dense", "attention.output.dense"),
    "self_attn_bda.norm": ("attention.output.LayerNorm", None),
    "pre_mlp_layernorm": (None, "ln"),
    "mlp.linear_fc1": ("intermediate.dense", "intermediate.dense"),
    "mlp.linear_fc2": ("output.dense", "output.dense"),
    "mlp_bda.norm": ("output.LayerNorm", None),
}
SHARDED = {"self_attention.linear_proj": (Plain(1), Plain()), "mlp.linear_fc1": (Plain(0), Plain(0)),
           "mlp.linear_fc2": (Plain(1), Plain())}  # fmt: skip


def bert(config: Any, *, norm_follows: bool, kind: str) -> ModelShape:
    """BERT.

    Args:
        config: Of a Hugging Face model.
        norm_follows: Whether norms are after attention and MLP.
        kind: The class of the model, without "Bert" and what precedes it.

    Raises:
        ValueError: The configuration has something that megatron-core lacks.
    """
    for name, default in (("is_decoder", False), ("add_cross_attention", False)):
        if bool(getattr(config, name, default)) != default:
            raise lacks(f"{name}=True", f"{name}=False")
    has_words = kind != "ForSequenceClassification"
    if has_words and not config.tie_word_embeddings:
        raise lacks("tie_word_embeddings=False", "tied embeddings")
    head = None
    if not has_words:
        dropout = getattr(config, "classifier_dropout", None)
        head = Classifier(config.num_labels, config.hidden_dropout_prob if dropout is None else dropout)
    task: Task = Masked(has_sentences=kind == "ForPreTraining") if has_words else Classified(config)
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_attention_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        mlp_size=config.intermediate_size,
        num_tokens=config.vocab_size,
        max_length=config.max_position_embeddings,
        tied=has_words,
        attention_dropout=config.attention_probs_dropout_prob,
        hidden_dropout=config.hidden_dropout_prob,
        window=None,
        activation=activation(config.hidden_act),
        layers={
            "normalization": "LayerNorm",
            "layernorm_epsilon": config.layer_norm_eps,
            "add_bias_linear": True,
            "gated_linear_unit": False,
        },
        model={
            "num_tokentypes": config.type_vocab_size,
            "add_binary_head": kind != "ForMaskedLM",
            "norm_follows": norm_follows,
            "head": head,
        },
        weights=partial(_weights, norm_follows=norm_follows, kind=kind),
        task=task,
        chunk=bert_chunk,
        takes_sequence_parallelism=False,
    )


def _weights(shape: ModelShape, num_rows: int, norm_follows: bool, kind: str) -> list[Weight]:
    rows = Vocabulary(shape.num_tokens, num_rows)
    qkv = QueryKeyValue(shape.heads, shape.groups, shape.head_size)
    words = "bert.embeddings.word_embeddings.weight"
    weights = [
        Weight("embedding.word_embeddings.weight", (words,), rows),
        Weight("embedding.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",), Plain()),
        Weight("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",), Plain()),
    ]

    def add(ours: str, theirs: str, weight: Layout | None = None, bias: Layout | None = None) -> None:
        for suffix, layout in (("weight", weight or Plain()), ("bias", bias or Plain())):
            weights.append(Weight(f"{ours}.{suffix}", (f"{theirs}.{suffix}",), layout))

    if norm_follows:
        add("embedding.embedding_dropout.0", "bert.embeddings.LayerNorm")
    for number in range(shape.num_layers):
        ours, theirs = f"encoder.layers.{number}.", f"bert.encoder.layer.{number}."
        for suffix in ("weight", "bias"):
            sources = tuple(f"{theirs}attention.self.{one}.{suffix}" for one in ("query", "key", "value"))
            weights.append(Weight(f"{ours}self_attention.linear_qkv.{suffix}", sources, qkv))
        for name, sources_of in NAMES.items():
            if (source := sources_of[0 if norm_follows else 1]) is not None:
                add(ours + name, theirs + source, *SHARDED.get(name, ()))
    if not norm_follows:
        add("encoder.final_layernorm", "bert.encoder.ln")
    if kind != "ForMaskedLM":
        add("pooler.dense", "bert.pooler.dense")
    if kind == "ForSequenceClassification":
        add("binary_head.1", "classifier")
        return weights
    if kind == "ForPreTraining":
        add("binary_head", "cls.seq_relationship")
    add("lm_head.dense", "cls.predictions.transform.dense")
    add("lm_head.layer_norm", "cls.predictions.transform.LayerNorm")
    weights.append(Weight("output_layer.weight", (words,), rows))
    weights.append(Weight("output_layer.bias", ("cls.predictions.bias",), rows))
    return weights


BERT_CLASSES = ("ForPreTraining", "ForMaskedLM", "ForSequenceClassification")
