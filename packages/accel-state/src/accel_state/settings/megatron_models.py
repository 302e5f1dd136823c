"""How the configuration of a transformers model becomes Megatron-LM's arguments, one parser per model family."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class ModelArguments(Protocol):
    """The attributes of `MegatronLMPlugin` that a parser reads and sets."""

    megatron_lm_default_args: dict[str, Any]
    encoder_seq_length: Any
    decoder_seq_length: Any
    return_logits: Any


Parser = Callable[[Any, Any, Any], None]
MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}
"""Parsers by model family; a family matches when `model.config.model_type` contains its name."""

BERT_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "orig_vocab_size": "vocab_size",
}
GPT2_SIZES = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "orig_vocab_size": "vocab_size",
}
T5_SIZES = {
    "num_layers": "num_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "n_positions",
    "orig_vocab_size": "vocab_size",
}
GLM4_MOE_SIZES = {
    **BERT_SIZES,
    "kv_channels": "head_dim",
    "qk_layernorm": "use_qk_norm",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "num_experts": "n_routed_experts",
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
    "eos_token_id": "eos_token_id",
}
GLM4_MOE_FACTS = {
    "position_embedding_type": "rope",
    "original_model_type": "glm4_moe",
    "add_bias_linear": False,
    "group_query_attention": True,
    "add_qkv_bias": True,
    "normalization": "RMSNorm",
    "rotary-percent": 0.5,
    "swiglu": True,
    "moe_router_pre_softmax": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_permute_fusion": True,
    "moe_aux_loss_coeff": 0,
    "rope_type": "rope",
    "norm_epsilon": 0.001,
    "use_flash_attn": True,
}
GLM4_MOE_FP8 = ("fp8", "fp8_param", "fp8_param_gather", "fp8_recipe")


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Decorator that registers a parser for a model family.

    Args:
        model_type: Substring of `model.config.model_type` that identifies the family.

    Example:
        ```python
        @add_model_config_to_megatron_parser("my-model")
        def parse_my_config(megatron_lm_plugin, model, batch_data):
            megatron_lm_plugin.megatron_lm_default_args["num_layers"] = model.config.depth
        ```
    """

    def register(parser: Parser) -> Parser:
        @functools.wraps(parser)
        def parse(*args: Any, **kwargs: Any) -> Any:
            return parser(*args, **kwargs)

        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parse
        return parse

    return register


def find_parser(model_type: str) -> Parser:
    """The parser for a model.

    Args:
        model_type: The `model_type` of the model's configuration.

    Raises:
        ValueError: When no family matches.
    """
    for family, parser in MODEL_CONFIGS_TO_MEGATRON_PARSERS.items():
        if family in model_type.lower():
            return parser
    known = ", ".join(map(repr, MODEL_CONFIGS_TO_MEGATRON_PARSERS))
    raise ValueError(
        f"Models of type {model_type!r} have no Megatron-LM parser, only those whose type contains one of {known}. "
        "Register one with add_model_config_to_megatron_parser()."
    )


def _value(config: Any, name: str) -> Any:
    """A value of a model's configuration; newer ones keep those of rotary embeddings in `rope_parameters`."""
    value = getattr(config, name, None)
    if value is None:
        value = (getattr(config, "rope_parameters", None) or {}).get(name)
    if value is None:
        raise ValueError(f"The model's config does not set {name!r}, which Megatron-LM needs. Set config.{name}.")
    return value


def _set_arguments(plugin: ModelArguments, config: Any, kind: str, sizes: Mapping[str, str], **facts: Any) -> None:
    plugin.megatron_lm_default_args |= {
        "model_type_name": kind,
        **{argument: _value(config, name) for argument, name in sizes.items()},
        "model_return_dict": getattr(config, "return_dict", True),
        **facts,
    }


def _set_length(plugin: ModelArguments, name: str, *candidates: int | None) -> None:
    """Set a sequence length, in tokens, to the first candidate that is known."""
    length = next(candidate for candidate in (getattr(plugin, name), *candidates) if candidate is not None)
    setattr(plugin, name, length)
    plugin.megatron_lm_default_args[name] = length


def _length(batch_data: Any, key: str = "input_ids") -> int | None:
    """Sequence length of a sample batch, whose tensors have shape (batch, sequence)."""
    return None if batch_data is None else int(batch_data[key].shape[1])


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: ModelArguments, model: Any, batch_data: Any) -> None:
    """Set the arguments for the sizes of a BERT model."""
    config = model.config
    pretraining = "maskedlm" in type(model).__name__.lower()
    _set_arguments(
        megatron_lm_plugin, config, "bert", BERT_SIZES, pretraining_flag=pretraining, num_labels=config.num_labels
    )
    longest = _value(config, "max_position_embeddings")
    _set_length(megatron_lm_plugin, "seq_length", megatron_lm_plugin.encoder_seq_length, _length(batch_data), longest)


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: ModelArguments, model: Any, batch_data: Any) -> None:
    """Set the arguments for the sizes of a GPT-2 model."""
    plugin, config = megatron_lm_plugin, model.config
    _set_arguments(
        plugin,
        config,
        "gpt",
        GPT2_SIZES,
        pretraining_flag=True,
        return_logits=plugin.return_logits,
        tokenizer_type="GPT2BPETokenizer",
    )
    longest = _value(config, "n_positions")
    _set_length(plugin, "seq_length", plugin.decoder_seq_length, _length(batch_data), longest)


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: ModelArguments, model: Any, batch_data: Any) -> None:
    """Set the arguments for the sizes of a T5 model."""
    config = model.config
    _set_arguments(megatron_lm_plugin, config, "t5", T5_SIZES, pretraining_flag=True)
    longest = _value(config, "n_positions")
    _set_length(megatron_lm_plugin, "encoder_seq_length", _length(batch_data), longest)
    _set_length(megatron_lm_plugin, "decoder_seq_length", _length(batch_data, "labels"), longest)


def _set_decoder_arguments(
    plugin: ModelArguments, config: Any, batch_data: Any, sizes: Mapping[str, str], **facts: Any
) -> None:
    _set_arguments(plugin, config, "gpt", sizes, return_logits=plugin.return_logits, **facts)
    own, longest = getattr(config, "max_sequence_length", None), _value(config, "max_position_embeddings")
    _set_length(plugin, "seq_length", own, plugin.decoder_seq_length, _length(batch_data), longest)


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: ModelArguments, model: Any, batch_data: Any) -> None:
    """Set the arguments for the sizes of a Llama model."""
    _set_decoder_arguments(
        megatron_lm_plugin,
        model.config,
        batch_data,
        BERT_SIZES,
        pretraining_flag=True,
        tokenizer_type="Llama2Tokenizer",
    )


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: ModelArguments, model: Any, batch_data: Any) -> None:
    """Set the arguments for the sizes and the mixture-of-experts layers of a GLM-4 MoE model."""
    config = model.config
    _set_decoder_arguments(
        megatron_lm_plugin,
        config,
        batch_data,
        GLM4_MOE_SIZES,
        pretraining_flag=False,
        tokenizer_type="HuggingFaceTokenizer",
        **GLM4_MOE_FACTS,
    )
    arguments = megatron_lm_plugin.megatron_lm_default_args
    num_dense = _value(config, "first_k_dense_replace")
    arguments["moe_layer_freq"] = [int(layer >= num_dense) for layer in range(config.num_hidden_layers)]
    arguments["untie_embeddings_and_output_weights"] = not config.tie_word_embeddings
    if getattr(config, "fp8_param", None):
        arguments |= {name: getattr(config, name, None) for name in GLM4_MOE_FP8}
    if getattr(config, "bf16", None) is not None:
        arguments["bf16"] = config.bf16
