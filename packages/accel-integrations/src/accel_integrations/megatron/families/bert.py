"""BERT in megatron-core's terms: with norms after attention and MLP (`bert`), or before them (`megatron-bert`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from accel_integrations.megatron.core import load
from accel_integrations.megatron.data.tasks import Classified, Masked, Task
from accel_integrations.megatron.families.chunk import Norm, Stage
from accel_integrations.megatron.families.shape import (
    ModelShape,
    Row,
    activation,
    check_defaults,
    lacks,
    sizes_of,
    weights_of,
)
from accel_integrations.megatron.weights.layouts import (
    COLUMNS,
    REPLICATED,
    ROWS,
    Layout,
    QueryKeyValue,
    Vocabulary,
    Weight,
)

BERT_CLASSES = ("ForPreTraining", "ForMaskedLM", "ForSequenceClassification")
LAYER = [  # the module of megatron-core, of `bert`, of `megatron-bert`, layouts of weight and bias
    ("input_layernorm", None, "attention.ln", ()),
    ("self_attention.linear_proj", "attention.output.dense", "attention.output.dense", (COLUMNS,)),
    ("self_attn_bda.norm", "attention.output.LayerNorm", None, ()),
    ("pre_mlp_layernorm", None, "ln", ()),
    ("mlp.linear_fc1", "intermediate.dense", "intermediate.dense", (ROWS, ROWS)),
    ("mlp.linear_fc2", "output.dense", "output.dense", (COLUMNS,)),
    ("mlp_bda.norm", "output.LayerNorm", None, ()),
]


def bert(config: Any, *, norm_follows: bool, kind: str) -> ModelShape:
    """BERT.

    Args:
        config: Of a Hugging Face model.
        norm_follows: Whether norms are after attention and MLP.
        kind: The class of the model, without "Bert" and what precedes it.

    Raises:
        ValueError: The configuration has something that megatron-core lacks.
    """
    check_defaults(config, is_decoder=False, add_cross_attention=False)
    has_words = kind != "ForSequenceClassification"
    if has_words and not config.tie_word_embeddings:
        raise lacks("tie_word_embeddings=False", "tied embeddings")
    head = None
    if not has_words:
        dropout = getattr(config, "classifier_dropout", None)
        head = Classifier(config.num_labels, config.hidden_dropout_prob if dropout is None else dropout)
    task: Task = Masked(has_sentences=kind == "ForPreTraining") if has_words else Classified(config)
    return ModelShape(
        **sizes_of(config) | {"tied": has_words},
        mlp_size=config.intermediate_size,
        max_length=config.max_position_embeddings,
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

    def both(name: str, sources: str, weight: Layout = REPLICATED, bias: Layout = REPLICATED) -> Row:
        return Row(name, sources, weight, bias)

    layer = [
        both(
            "self_attention.linear_qkv",
            " ".join(f"attention.self.{one}" for one in ("query", "key", "value")),
            qkv,
            qkv,
        )
    ]
    for name, *sources, layouts in LAYER:
        if (source := sources[0 if norm_follows else 1]) is not None:
            layer.append(both(name, source, *layouts))
    embeddings = "bert.embeddings."
    weights = [
        *weights_of([Row("embedding.word_embeddings", "word_embeddings", rows)], theirs=embeddings),
        *weights_of([Row("embedding.position_embeddings", "position_embeddings")], theirs=embeddings),
        *weights_of([Row("embedding.tokentype_embeddings", "token_type_embeddings")], theirs=embeddings),
    ]
    if norm_follows:
        weights += weights_of([both("embedding.embedding_dropout.0", "LayerNorm")], theirs=embeddings)
    for number in range(shape.num_layers):
        weights += weights_of(layer, f"encoder.layers.{number}.", f"bert.encoder.layer.{number}.")
    heads = [] if norm_follows else [both("encoder.final_layernorm", "bert.encoder.ln")]
    if kind != "ForMaskedLM":
        heads.append(both("pooler.dense", "bert.pooler.dense"))
    if kind == "ForSequenceClassification":
        return [*weights, *weights_of([*heads, both("binary_head.1", "classifier")])]
    if kind == "ForPreTraining":
        heads.append(both("binary_head", "cls.seq_relationship"))
    heads.append(both("lm_head.dense", "cls.predictions.transform.dense"))
    heads.append(both("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"))
    heads.append(Row("output_layer", f"{embeddings}word_embeddings", rows))
    return [*weights, *weights_of(heads), Weight("output_layer.bias", ("cls.predictions.bias",), rows)]


# ---- the chunk ------------------------------------------------------------------------------------------------------


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
        """Return the first tokens, which nobody uses."""
        return hidden_states[:1].detach()


class NoTokens(nn.Module):
    """Stands for the output layer over the vocabulary in a model that classifies sequences."""

    def forward(self, hidden_states: Tensor, weight: Any = None) -> tuple[Tensor, None]:
        """Return the input unchanged."""
        return hidden_states, None


def bert_chunk(shape: ModelShape, config: Any, stage: Stage, num_rows: int) -> Any:
    """A chunk of an encoder; see `shape.Chunk`. `shape.model` says where its norms are, and which head it has."""
    options = dict(shape.model)
    norm_follows, head = options.pop("norm_follows"), options.pop("head")
    chunk = load("models.bert.bert_model").BertModel(
        config=config,
        transformer_layer_spec=_bert_layer(config, norm_follows=norm_follows),
        vocab_size=num_rows,
        max_sequence_length=shape.max_length,
        share_embeddings_and_output_weights=shape.tied,
        **stage.options(),
        **options,
    )
    if norm_follows and stage.is_first:
        before = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        chunk.embedding.embedding_dropout = nn.Sequential(before, chunk.embedding.embedding_dropout)
    if stage.is_last:
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
