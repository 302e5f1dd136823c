"""The table of Hugging Face model types that megatron-core can train, and their configurations in its terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from accel_integrations.engines.megatron.bert import BERT_CLASSES, bert
from accel_integrations.engines.megatron.layouts import GateAndUp, Plain, QueryKeyValue, Vocabulary
from accel_integrations.engines.megatron.shape import ModelShape, Weight
from accel_integrations.engines.megatron.sources import tensor_name
from accel_integrations.engines.megatron.supported import activation, lacks
from accel_integrations.engines.megatron.t5 import t5

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only scaling of rotary embeddings that megatron-core has, but for `factor`."""


def shape_of(model: nn.Module) -> ModelShape:
    """A Hugging Face model in megatron-core's terms.

    Raises:
        ValueError: Its type is not in the table, or its configuration has something that megatron-core lacks.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    class_name = type(model).__name__
    model_type, read = FAMILIES.get(class_name, (None, None))
    if read is None or kind != model_type:
        if kind in REFUSED:
            raise ValueError(f"prepare() got a {class_name}, which is not mapped to Megatron-LM: {REFUSED[kind]}")
        families = ", ".join(sorted(f"{name} ({class_of})" for class_of, (name, _) in FAMILIES.items()))
        raise ValueError(
            f"prepare() got a {class_name} with model_type={kind!r}, which is not mapped to Megatron-LM. Mapped are: "
            f"{families}. Use one of these, or train it with FSDP or ParallelismConfig."
        )
    shape = read(config)
    stored = dict(model.named_parameters(remove_duplicate=False))
    mapped = {tensor_name(source) for weight in shape.weights(shape, shape.num_tokens) for source in weight.sources}
    tied = {id(stored[name]) for name in mapped & set(stored)}
    surplus = sorted(name for name, one in stored.items() if id(one) not in tied)
    missing = sorted(mapped - set(stored))
    if surplus or missing:
        raise ValueError(
            f"The {class_name} is not as its configuration says: {', '.join([*surplus, *missing][:3])} "
            f"{'is not mapped to Megatron-LM' if surplus else 'is missing'}. Pass the model without adapters or other "
            "changes."
        )
    return shape


# ---- Llama and its relatives ----------------------------------------------------------------------------------------


def _llama(
    config: Any, *, qkv_bias: bool = False, query_norm: bool = False, experts: Experts | None = None
) -> ModelShape:
    """Llama, Mistral, Qwen 2 and 3: RMSNorm, rotary embeddings, gated MLP or experts, grouped queries."""
    biased = bool(getattr(config, "attention_bias", False)) and not qkv_bias
    if biased != bool(getattr(config, "mlp_bias", False)):
        raise lacks("attention_bias without mlp_bias, or the reverse", "both or neither")
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        mlp_size=config.intermediate_size,
        num_tokens=config.vocab_size,
        max_length=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
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
    shape: ModelShape, num_rows: int, qkv_bias: bool, biased: bool, query_norm: bool, experts: Experts | None
) -> list[Weight]:
    rows = Vocabulary(shape.num_tokens, num_rows)
    qkv = QueryKeyValue(shape.heads, shape.groups, shape.head_size)
    out = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    weights = [Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), rows)]
    for number in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."

        def add(name: str, layout: Any, *sources: str, ours: str = ours, theirs: str = theirs) -> None:
            weights.append(Weight(ours + name, tuple(theirs + source for source in sources), layout))

        add("input_layernorm.weight", Plain(), "input_layernorm.weight")
        for kind in ("weight", "bias") if qkv_bias else ("weight",):
            add(f"self_attention.linear_qkv.{kind}", qkv, *(f"self_attn.{one}_proj.{kind}" for one in "qkv"))
        if query_norm:
            for one in "qk":
                add(f"self_attention.{one}_layernorm.weight", Plain(), f"self_attn.{one}_norm.weight")
        add("self_attention.linear_proj.weight", Plain(1), "self_attn.o_proj.weight")
        add("pre_mlp_layernorm.weight", Plain(), "post_attention_layernorm.weight")
        if experts is not None:
            add("mlp.router.weight", Plain(), "mlp.gate.weight")
            for expert in range(experts.count):
                one = f"mlp.experts.local_experts.{expert}."
                add(one + "linear_fc1.weight", GateAndUp(fused=True), f"mlp.experts.gate_up_proj[{expert}]")
                add(one + "linear_fc2.weight", Plain(1), f"mlp.experts.down_proj[{expert}]")
            continue
        add("mlp.linear_fc1.weight", GateAndUp(), "mlp.gate_proj.weight", "mlp.up_proj.weight")
        add("mlp.linear_fc2.weight", Plain(1), "mlp.down_proj.weight")
        if biased:
            add("self_attention.linear_proj.bias", Plain(), "self_attn.o_proj.bias")
            add("mlp.linear_fc1.bias", GateAndUp(), "mlp.gate_proj.bias", "mlp.up_proj.bias")
            add("mlp.linear_fc2.bias", Plain(), "mlp.down_proj.bias")
    weights.append(Weight("decoder.final_layernorm.weight", ("model.norm.weight",), Plain()))
    weights.append(Weight("output_layer.weight", (out,), rows))
    return weights


# ---- GPT-2 ----------------------------------------------------------------------------------------------------------


def _gpt2(config: Any) -> ModelShape:
    """GPT-2: LayerNorm, learned positions, biases everywhere."""
    for name, default in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if bool(getattr(config, name, default)) != default:
            raise lacks(f"{name}={not default}", f"{name}={default}")
    return ModelShape(
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        heads=config.n_head,
        groups=config.n_head,
        head_size=config.n_embd // config.n_head,
        mlp_size=config.n_inner or 4 * config.n_embd,
        num_tokens=config.vocab_size,
        max_length=config.n_positions,
        tied=bool(config.tie_word_embeddings),
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
    )


def _gpt2_weights(shape: ModelShape, num_rows: int) -> list[Weight]:
    rows = Vocabulary(shape.num_tokens, num_rows)
    qkv = QueryKeyValue(shape.heads, shape.groups, shape.head_size, fused=True, transposed=True)
    weights = [
        Weight("embedding.word_embeddings.weight", ("transformer.wte.weight",), rows),
        Weight("embedding.position_embeddings.weight", ("transformer.wpe.weight",), Plain()),
    ]
    layouts = {  # name of megatron-core, name of the model, layouts of weight and bias
        "input_layernorm": ("ln_1", Plain(), Plain()),
        "self_attention.linear_qkv": ("attn.c_attn", qkv, qkv),
        "self_attention.linear_proj": ("attn.c_proj", Plain(1, transposed=True), Plain()),
        "pre_mlp_layernorm": ("ln_2", Plain(), Plain()),
        "mlp.linear_fc1": ("mlp.c_fc", Plain(0, transposed=True), Plain(0)),
        "mlp.linear_fc2": ("mlp.c_proj", Plain(1, transposed=True), Plain()),
    }
    for number in range(shape.num_layers):
        for ours, (theirs, *of_both) in layouts.items():
            for kind, layout in zip(("weight", "bias"), of_both, strict=True):
                source = f"transformer.h.{number}.{theirs}.{kind}"
                weights.append(Weight(f"decoder.layers.{number}.{ours}.{kind}", (source,), layout))
    for kind in ("weight", "bias"):
        weights.append(Weight(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",), Plain()))
    weights.append(
        Weight("output_layer.weight", ("transformer.wte.weight" if shape.tied else "lm_head.weight",), rows)
    )
    return weights


# ---- mixtures of experts ---------------------------------------------------------------------------------------------


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


def _mixtral(config: Any) -> ModelShape:
    """Mixtral: experts in every layer, whose weights sum to one for each token."""
    _check_routing(config)
    count, chosen = config.num_local_experts, config.num_experts_per_tok
    return _llama(config, experts=Experts(count, chosen, config.intermediate_size, sums_to_one=True))


def _qwen3_moe(config: Any) -> ModelShape:
    """Qwen 3 with experts in every layer."""
    _check_routing(config)
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise lacks(
            f"mlp_only_layers={config.mlp_only_layers}, decoder_sparse_step={config.decoder_sparse_step}",
            "experts in every layer",
        )
    count, chosen = config.num_experts, config.num_experts_per_tok
    experts = Experts(count, chosen, config.moe_intermediate_size, sums_to_one=config.norm_topk_prob)
    return _llama(config, query_norm=True, experts=experts)


def _check_routing(config: Any) -> None:
    for name, default in (("output_router_logits", False), ("router_jitter_noise", 0.0)):
        if (value := getattr(config, name, default)) != default:
            raise lacks(f"{name}={value}", f"{name}={default}")


Reader = Callable[[Any], ModelShape]
FAMILIES: dict[str, tuple[str, Reader]] = {
    "GPT2LMHeadModel": ("gpt2", _gpt2),
    "LlamaForCausalLM": ("llama", _llama),
    "MistralForCausalLM": ("mistral", _llama),
    "MixtralForCausalLM": ("mixtral", _mixtral),
    "Qwen2ForCausalLM": ("qwen2", partial(_llama, qkv_bias=True)),
    "Qwen3ForCausalLM": ("qwen3", partial(_llama, query_norm=True)),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _qwen3_moe),
    "T5ForConditionalGeneration": ("t5", t5),
    **{f"Bert{one}": ("bert", partial(bert, norm_follows=True, kind=one)) for one in BERT_CLASSES},
    **{f"MegatronBert{one}": ("megatron-bert", partial(bert, norm_follows=False, kind=one)) for one in BERT_CLASSES},
}
"""By the class of the model: `config.model_type`, and the function that reads its configuration."""
REFUSED = {
    "glm4_moe": (
        "some of its layers have experts and others have none, and experts are shared. Train it with FSDP or DeepSpeed."
    ),
}
"""By `config.model_type`: why a kind of model for which accelerate 1.15 has a parser is not mapped, and what to do."""
