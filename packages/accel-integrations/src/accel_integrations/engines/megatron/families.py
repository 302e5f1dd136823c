"""The table of Hugging Face model types that megatron-core can train, and their configurations in its terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional as F

from accel_integrations.engines.megatron.layouts import GateAndUp, Plain, QueryKeyValue, Vocabulary
from accel_integrations.engines.megatron.shape import ModelShape, Weight

ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
}
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
    wanted, read = FAMILIES.get(str(kind), (None, None))
    if read is None or class_name != wanted:
        known = ", ".join(sorted(f"{name} ({class_of})" for name, (class_of, _) in FAMILIES.items()))
        raise ValueError(
            f"prepare() got a {class_name} with model_type={kind!r}, which is not mapped to Megatron-LM. Mapped are: "
            f"{known}. Use one of these, or train it with FSDP or ParallelismConfig."
        )
    shape = read(config)
    stored = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    mapped = {source for weight in shape.weights(shape, shape.num_tokens) for source in weight.sources}
    surplus, missing = sorted(stored - mapped - ({"lm_head.weight"} if shape.tied else set())), sorted(mapped - stored)
    if surplus or missing:
        raise ValueError(
            f"The {class_name} is not as its configuration says: {', '.join([*surplus, *missing][:3])} "
            f"{'is not mapped to Megatron-LM' if surplus else 'is missing'}. Pass the model without adapters or other "
            "changes."
        )
    return shape


def _activation(name: str) -> Callable[..., Any]:
    if name not in ACTIVATIONS:
        raise _lacks(f"the activation {name!r}", f"one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def _lacks(what: str, instead: str) -> ValueError:
    return ValueError(f"The model's configuration has {what}, which is not mapped to Megatron-LM. Use {instead}.")


# ---- Llama and its relatives ----------------------------------------------------------------------------------------


def _llama(config: Any, *, qkv_bias: bool = False, query_norm: bool = False) -> ModelShape:
    """Llama, Mistral, Qwen 2 and 3: RMSNorm, rotary embeddings, gated MLP, grouped queries."""
    biased = bool(getattr(config, "attention_bias", False)) and not qkv_bias
    if biased != bool(getattr(config, "mlp_bias", False)):
        raise _lacks("attention_bias without mlp_bias, or the reverse", "both or neither")
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
        activation=_activation(config.hidden_act),
        layers={
            "normalization": "RMSNorm",
            "layernorm_epsilon": config.rms_norm_eps,
            "add_bias_linear": biased,
            "add_qkv_bias": qkv_bias or biased,
            "gated_linear_unit": True,
            "qk_layernorm": query_norm,
        },
        model=_rotary(config),
        weights=partial(_llama_weights, qkv_bias=qkv_bias or biased, biased=biased, query_norm=query_norm),
    )


def _window(config: Any) -> int | None:
    size = getattr(config, "sliding_window", None)
    return size if size and getattr(config, "use_sliding_window", True) else None


def _rotary(config: Any) -> dict[str, Any]:
    settings = dict(getattr(config, "rope_parameters", None) or {})
    kind = settings.get("rope_type", "default")
    found: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": settings.get("rope_theta", 10000.0)}
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise _lacks(
            "rotary embeddings of a part of each head (partial_rotary_factor)", "rotary embeddings of all of it"
        )
    if kind == "default":
        return found
    if kind == "llama3" and all(settings.get(name) == value for name, value in LLAMA3_SCALING.items()):
        return found | {"rope_scaling": True, "rope_scaling_factor": settings["factor"]}
    raise _lacks(f"rope_parameters={settings!r}", f"rope_type 'default', or 'llama3' with {LLAMA3_SCALING}")


def _llama_weights(shape: ModelShape, num_rows: int, qkv_bias: bool, biased: bool, query_norm: bool) -> list[Weight]:
    rows = Vocabulary(shape.num_tokens, num_rows)
    qkv = QueryKeyValue(shape.heads, shape.groups, shape.head_size)
    out = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    found = [Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), rows)]
    for number in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."

        def add(name: str, layout: Any, *sources: str, ours: str = ours, theirs: str = theirs) -> None:
            found.append(Weight(ours + name, tuple(theirs + source for source in sources), layout))

        add("input_layernorm.weight", Plain(), "input_layernorm.weight")
        for kind in ("weight", "bias") if qkv_bias else ("weight",):
            add(f"self_attention.linear_qkv.{kind}", qkv, *(f"self_attn.{one}_proj.{kind}" for one in "qkv"))
        if query_norm:
            for one in "qk":
                add(f"self_attention.{one}_layernorm.weight", Plain(), f"self_attn.{one}_norm.weight")
        add("self_attention.linear_proj.weight", Plain(1), "self_attn.o_proj.weight")
        add("pre_mlp_layernorm.weight", Plain(), "post_attention_layernorm.weight")
        add("mlp.linear_fc1.weight", GateAndUp(), "mlp.gate_proj.weight", "mlp.up_proj.weight")
        add("mlp.linear_fc2.weight", Plain(1), "mlp.down_proj.weight")
        if biased:
            add("self_attention.linear_proj.bias", Plain(), "self_attn.o_proj.bias")
            add("mlp.linear_fc1.bias", GateAndUp(), "mlp.gate_proj.bias", "mlp.up_proj.bias")
            add("mlp.linear_fc2.bias", Plain(), "mlp.down_proj.bias")
    found.append(Weight("decoder.final_layernorm.weight", ("model.norm.weight",), Plain()))
    found.append(Weight("output_layer.weight", (out,), rows))
    return found


# ---- GPT-2 ----------------------------------------------------------------------------------------------------------


def _gpt2(config: Any) -> ModelShape:
    """GPT-2: LayerNorm, learned positions, biases everywhere."""
    for name, wanted in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if bool(getattr(config, name, wanted)) != wanted:
            raise _lacks(f"{name}={not wanted}", f"{name}={wanted}")
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
        activation=_activation(config.activation_function),
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
    found = [
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
                found.append(Weight(f"decoder.layers.{number}.{ours}.{kind}", (source,), layout))
    for kind in ("weight", "bias"):
        found.append(Weight(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",), Plain()))
    found.append(Weight("output_layer.weight", ("transformer.wte.weight" if shape.tied else "lm_head.weight",), rows))
    return found


FAMILIES: dict[str, tuple[str, Callable[[Any], ModelShape]]] = {
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", partial(_llama, qkv_bias=True)),
    "qwen3": ("Qwen3ForCausalLM", partial(_llama, query_norm=True)),
}
"""By `config.model_type`: the class of the model, and the function that reads its configuration."""
