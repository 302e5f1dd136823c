"""The table of Hugging Face model types that megatron-core can train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from accel_integrations.megatron.families.bert import BERT_CLASSES, bert
from accel_integrations.megatron.families.decoders import gpt2, llama, mixtral, qwen3_moe
from accel_integrations.megatron.families.shape import ModelShape
from accel_integrations.megatron.families.t5 import t5
from accel_integrations.megatron.weights.layouts import tensor_name

Reader = Callable[[Any], ModelShape]
FAMILIES: dict[str, tuple[str, Reader]] = {
    "GPT2LMHeadModel": ("gpt2", gpt2),
    "LlamaForCausalLM": ("llama", llama),
    "MistralForCausalLM": ("mistral", llama),
    "MixtralForCausalLM": ("mixtral", mixtral),
    "Qwen2ForCausalLM": ("qwen2", partial(llama, qkv_bias=True)),
    "Qwen3ForCausalLM": ("qwen3", partial(llama, query_norm=True)),
    "Qwen3MoeForCausalLM": ("qwen3_moe", qwen3_moe),
    "T5ForConditionalGeneration": ("t5", t5),
    "MT5ForConditionalGeneration": ("mt5", t5),
    **{f"Bert{kind}": ("bert", partial(bert, norm_follows=True, kind=kind)) for kind in BERT_CLASSES},
    **{
        f"MegatronBert{kind}": ("megatron-bert", partial(bert, norm_follows=False, kind=kind)) for kind in BERT_CLASSES
    },
}
"""By the class of the model: `config.model_type`, and the function that reads its configuration."""
REFUSED = {
    "glm4_moe": (
        "some of its layers have experts and others have none, and experts are shared. Train it with FSDP or DeepSpeed."
    ),
}
"""By `config.model_type`: why a kind of model for which accelerate 1.15 has a parser is not mapped, and what to do."""


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
