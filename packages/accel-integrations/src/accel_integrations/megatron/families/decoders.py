"""Decoders that predict the next token, in megatron-core's terms: GPT-2, Llama and its relatives, mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from accel_integrations.megatron.core import load
from accel_integrations.megatron.data.sequences import GatheredAttention
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
    GateAndUp,
    Plain,
    QueryKeyValue,
    Vocabulary,
    Weight,
)

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only scaling of rotary embeddings that megatron-core has, except for `factor`."""
WORDS = "embedding.word_embeddings"


def decoder_chunk(shape: ModelShape, config: Any, stage: Stage, num_rows: int) -> Any:
    """A chunk of a decoder; see `shape.Chunk`."""
    return load("models.gpt.gpt_model").GPTModel(
        config,
        _layers(config, stage),
        vocab_size=num_rows,
        max_sequence_length=shape.max_length,
        share_embeddings_and_output_weights=shape.tied,
        **stage.options(),
        **shape.model,
    )


def _layers(config: Any, stage: Stage) -> Any:
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
    count = block.get_num_layers_to_build(config, vp_stage=stage.virtual)
    return block.TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


# ---- Llama and its relatives ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """The experts of each layer.

    Args:
        count: How many there are.
        chosen: How many each token goes to.
        size: Columns of the MLP of each.
        sums_to_one: Whether the weights of those that were chosen are scaled to a sum of 1.
    """

    count: int
    chosen: int
    size: int
    sums_to_one: bool

    def settings(self) -> dict[str, Any]:
        """Arguments of `TransformerConfig`."""
        return {
            "num_moe_experts": self.count,
            "moe_router_topk": self.chosen,
            "moe_ffn_hidden_size": self.size,
            "moe_router_pre_softmax": not self.sums_to_one,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
        }


def llama(
    config: Any, *, qkv_bias: bool = False, query_norm: bool = False, experts: Experts | None = None
) -> ModelShape:
    """Llama, Mistral, Qwen 2 and 3: RMSNorm, rotary embeddings, gated MLP or experts, grouped queries.

    Args:
        config: Of a Hugging Face model.
        qkv_bias: Whether queries, keys and values alone have a bias.
        query_norm: Whether queries and keys have norms.
        experts: In place of the MLPs.

    Raises:
        ValueError: The configuration has something that megatron-core lacks.
    """
    biased = bool(getattr(config, "attention_bias", False)) and not qkv_bias
    if biased != bool(getattr(config, "mlp_bias", False)):
        raise lacks("attention_bias without mlp_bias, or the reverse", "both or neither")
    return ModelShape(
        **sizes_of(config),
        mlp_size=config.intermediate_size,
        max_length=config.max_position_embeddings,
        attention_dropout=getattr(config, "attention_dropout", 0.0),
        hidden_dropout=0.0,
        window=_window(config),
        activation=activation(config.hidden_act),
        layers={
            "normalization": "RMSNorm",
            "layernorm_epsilon": config.rms_norm_eps,
            "add_bias_linear": biased,
            "add_qkv_bias": qkv_bias or biased,
            "gated_linear_unit": True,
            "qk_layernorm": query_norm,
            **({} if experts is None else experts.settings()),
        },
        model=_rotary(config),
        weights=partial(
            _llama_weights, qkv_bias=qkv_bias or biased, biased=biased, query_norm=query_norm, experts=experts
        ),
        chunk=decoder_chunk,
        num_experts=None if experts is None else experts.count,
    )


def _window(config: Any) -> int | None:
    size = getattr(config, "sliding_window", None)
    return size if size and getattr(config, "use_sliding_window", True) else None


def _rotary(config: Any) -> dict[str, Any]:
    settings = dict(getattr(config, "rope_parameters", None) or {})
    kind = settings.get("rope_type", "default")
    options: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": settings.get("rope_theta", 10000.0)}
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise lacks(
            "rotary embeddings of a part of each head (partial_rotary_factor)", "rotary embeddings of all of it"
        )
    if kind == "default":
        return options
    if kind == "llama3" and all(settings.get(name) == value for name, value in LLAMA3_SCALING.items()):
        return options | {"rope_scaling": True, "rope_scaling_factor": settings["factor"]}
    raise lacks(f"rope_parameters={settings!r}", f"rope_type 'default', or 'llama3' with {LLAMA3_SCALING}")


def _llama_weights(
    shape: ModelShape, num_rows: int, *, qkv_bias: bool, biased: bool, query_norm: bool, experts: Experts | None
) -> list[Weight]:
    rows, gate = Vocabulary(shape.num_tokens, num_rows), GateAndUp()
    qkv = QueryKeyValue(shape.heads, shape.groups, shape.head_size)
    bias = REPLICATED if biased else None
    layer = [
        Row("input_layernorm", "input_layernorm"),
        Row(
            "self_attention.linear_qkv",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            qkv,
            qkv if qkv_bias else None,
        ),
        Row("self_attention.linear_proj", "self_attn.o_proj", COLUMNS, bias),
        Row("pre_mlp_layernorm", "post_attention_layernorm"),
    ]
    if query_norm:
        layer += [Row(f"self_attention.{one}_layernorm", f"self_attn.{one}_norm") for one in "qk"]
    if experts is None:
        layer.append(Row("mlp.linear_fc1", "mlp.gate_proj mlp.up_proj", gate, gate if biased else None))
        layer.append(Row("mlp.linear_fc2", "mlp.down_proj", COLUMNS, bias))
    else:
        layer.append(Row("mlp.router", "mlp.gate"))
    weights = [*weights_of([Row(WORDS, "model.embed_tokens", rows)])]
    for number in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        weights += weights_of(layer, ours, theirs)
        for expert in range(0 if experts is None else experts.count):
            for module, source, layout in (
                ("linear_fc1", "gate_up_proj", GateAndUp(fused=True)),
                ("linear_fc2", "down_proj", COLUMNS),
            ):
                name = f"{ours}mlp.experts.local_experts.{expert}.{module}.weight"
                weights.append(Weight(name, (f"{theirs}mlp.experts.{source}[{expert}]",), layout))
    head = Row("output_layer", "model.embed_tokens" if shape.tied else "lm_head", rows)
    return [*weights, *weights_of([Row("decoder.final_layernorm", "model.norm"), head])]


def mixtral(config: Any) -> ModelShape:
    """Mixtral: experts in every layer, whose weights sum to one for each token."""
    check_defaults(config, output_router_logits=False, router_jitter_noise=0.0)
    count, chosen = config.num_local_experts, config.num_experts_per_tok
    return llama(config, experts=Experts(count, chosen, config.intermediate_size, sums_to_one=True))


def qwen3_moe(config: Any) -> ModelShape:
    """Qwen 3 with experts in every layer."""
    check_defaults(config, output_router_logits=False)
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise lacks(
            f"mlp_only_layers={config.mlp_only_layers}, decoder_sparse_step={config.decoder_sparse_step}",
            "experts in every layer",
        )
    count, chosen = config.num_experts, config.num_experts_per_tok
    experts = Experts(count, chosen, config.moe_intermediate_size, sums_to_one=config.norm_topk_prob)
    return llama(config, query_norm=True, experts=experts)


# ---- GPT-2 ----------------------------------------------------------------------------------------------------------


def gpt2(config: Any) -> ModelShape:
    """GPT-2: LayerNorm, learned positions, biases everywhere.

    Raises:
        ValueError: The configuration has something that megatron-core lacks.
    """
    check_defaults(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return ModelShape(
        **sizes_of(config),
        mlp_size=config.n_inner or 4 * config.n_embd,
        max_length=config.n_positions,
        attention_dropout=config.attn_pdrop,
        hidden_dropout=config.resid_pdrop,
        window=None,
        activation=activation(config.activation_function),
        layers={
            "normalization": "LayerNorm",
            "layernorm_epsilon": config.layer_norm_epsilon,
            "add_bias_linear": True,
            "gated_linear_unit": False,
        },
        model={"position_embedding_type": "learned_absolute"},
        weights=_gpt2_weights,
        chunk=decoder_chunk,
    )


def _gpt2_weights(shape: ModelShape, num_rows: int) -> list[Weight]:
    rows = Vocabulary(shape.num_tokens, num_rows)
    qkv = QueryKeyValue(shape.heads, shape.groups, shape.head_size, fused=True, transposed=True)
    layer = [
        Row("input_layernorm", "ln_1", bias=REPLICATED),
        Row("self_attention.linear_qkv", "attn.c_attn", qkv, qkv),
        Row("self_attention.linear_proj", "attn.c_proj", Plain(1, transposed=True), REPLICATED),
        Row("pre_mlp_layernorm", "ln_2", bias=REPLICATED),
        Row("mlp.linear_fc1", "mlp.c_fc", Plain(0, transposed=True), ROWS),
        Row("mlp.linear_fc2", "mlp.c_proj", Plain(1, transposed=True), REPLICATED),
    ]
    embeddings = [Row(WORDS, "transformer.wte", rows), Row("embedding.position_embeddings", "transformer.wpe")]
    head = Row("output_layer", "transformer.wte" if shape.tied else "lm_head", rows)
    weights = [*weights_of(embeddings)]
    for number in range(shape.num_layers):
        weights += weights_of(layer, f"decoder.layers.{number}.", f"transformer.h.{number}.")
    return [*weights, *weights_of([Row("decoder.final_layernorm", "transformer.ln_f", bias=REPLICATED), head])]
