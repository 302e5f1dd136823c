"""Building this rank's chunks of a model with megatron-core's local layers, wrapped for data parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_integrations.engines.megatron.library import load

if TYPE_CHECKING:
    from accel_integrations.engines.megatron.groups import Degrees
    from accel_integrations.engines.megatron.shape import ModelShape
    from accel_state.settings.megatron import MegatronLMPlugin

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
OFF = ("gradient_accumulation_fusion", "bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion",
       "apply_rope_fusion", "persist_layer_norm", "cross_entropy_loss_fusion")  # fmt: skip
"""Options that need kernels of Apex or Transformer Engine."""


class Norm:
    """Makes torch's norms as megatron-core asks for them, also under sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """The norm that the configuration names, whose gradients are summed over ranks with other tokens."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made


@dataclass
class Chunks:
    """This rank's part of a model: one chunk, or several virtual pipeline stages.

    Args:
        config: megatron-core's configuration of the model.
        wrapped: The chunks, wrapped for data parallelism.
        modules: The chunks themselves.
    """

    config: Any
    wrapped: list[Any]
    modules: list[Any]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name, layers numbered as in the full model."""
        found = {}
        for module in self.modules:
            numbers = [layer.layer_number - 1 for layer in module.decoder.layers]
            for name, parameter in module.named_parameters():

                def number(match: re.Match[str], numbers: list[int] = numbers) -> str:
                    return f"decoder.layers.{numbers[int(match[1])]}."

                found[LAYER.sub(number, name)] = parameter
        return found


def make_config(
    shape: ModelShape, plugin: MegatronLMPlugin, degrees: Degrees, dtype: torch.dtype, device: torch.device
) -> Any:
    """megatron-core's configuration of a model.

    Args:
        shape: The model.
        plugin: The settings of the run.
        degrees: The parallelism degrees.
        dtype: That of parameters and activations.
        device: Where it will be trained.

    Raises:
        ValueError: `other_megatron_args` has a name that megatron-core does not know.
    """
    kind = load("transformer.transformer_config").TransformerConfig
    chunk = plugin.num_layers_per_virtual_pipeline_stage if degrees.pipeline > 1 else None
    virtual = None if chunk is None else shape.num_layers // degrees.pipeline // chunk
    interleaved = virtual is not None and virtual > 1
    options: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.head_size,
        "ffn_hidden_size": shape.mlp_size,
        "activation_func": shape.activation,
        "attention_dropout": plugin.attention_dropout or shape.attention_dropout,
        "hidden_dropout": plugin.hidden_dropout or shape.hidden_dropout,
        "attention_softmax_in_fp32": plugin.attention_softmax_in_fp32,
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "virtual_pipeline_model_parallel_size": virtual if interleaved else None,
        "overlap_p2p_comm": interleaved,  # with two stages, batched messages of both directions would be mixed up
        "batch_p2p_comm": not interleaved,
        "sequence_parallel": plugin.sequence_parallelism and degrees.tensor > 1,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
        "calculate_per_token_loss": plugin.calculate_per_token_loss and plugin.custom_loss_function is None,
        **dict.fromkeys(OFF, False),
        **shape.layers,
        **_recomputation(plugin),
    }
    if plugin.decoder_last_pipeline_num_layers is not None and degrees.pipeline > 1:
        options["num_layers_in_last_pipeline_stage"] = plugin.decoder_last_pipeline_num_layers
    others = plugin.other_megatron_args or {}
    if unknown := sorted(set(others) - set(kind.__dataclass_fields__)):
        raise ValueError(
            f"MegatronLMPlugin.other_megatron_args has {', '.join(map(repr, unknown))}, which megatron-core's "
            "TransformerConfig does not have. Leave it out, or use the field of MegatronLMPlugin for it."
        )
    return kind(**options | others)


def _recomputation(plugin: MegatronLMPlugin) -> dict[str, Any]:
    if not plugin.recompute_activations:
        return {}
    if plugin.recompute_granularity == "selective":
        return {"recompute_granularity": "selective"}
    return {
        "recompute_granularity": "full",
        "recompute_method": plugin.recompute_method,
        "recompute_num_layers": plugin.recompute_num_layers,
    }


def build(shape: ModelShape, config: Any, degrees: Degrees, device: torch.device) -> list[Any]:
    """This rank's chunks, with weights that are still to be loaded."""
    parallel, gpt = load("parallel_state"), load("models.gpt.gpt_model")
    virtual = config.virtual_pipeline_model_parallel_size
    parallel.set_virtual_pipeline_model_parallel_world_size(virtual)
    chunks = []
    for number in range(virtual or 1):
        stage = None if virtual is None else number
        chunk = gpt.GPTModel(
            config,
            _layers(config, stage),
            vocab_size=shape.num_rows(degrees),
            max_sequence_length=shape.max_length,
            pre_process=parallel.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=shape.tied,
            vp_stage=stage,
            **shape.model,
        )
        chunk.model_type = load("enums").ModelType.encoder_or_decoder
        if chunk.post_process and shape.num_rows(degrees) > shape.num_tokens:
            chunk.output_layer.register_forward_hook(_hide_padding(shape.num_tokens, chunk.output_layer))
        chunks.append(chunk.to(device=device, dtype=config.params_dtype))
    return chunks


def _layers(config: Any, stage: int | None) -> Any:
    """The layers of a chunk, with our norms."""
    specs, block = load("models.gpt.gpt_layer_specs"), load("transformer.transformer_block")
    layer = specs.get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    count = block.get_num_layers_to_build(config, vp_stage=stage)
    return block.TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


def _hide_padding(num_tokens: int, layer: Any) -> Any:
    """A hook that keeps rows which only pad the vocabulary out of the softmax."""
    parallel = load("parallel_state")

    def hide(module: Any, inputs: Any, outputs: Any) -> Any:
        logits, bias = outputs  # (sequence, batch, tokens of this rank)
        first = parallel.get_tensor_model_parallel_rank() * logits.shape[-1]
        padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= num_tokens
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min / 2), bias

    return hide


def wrap(config: Any, modules: list[Any]) -> Chunks:
    """Wrap chunks so that gradients are averaged over replicas, in float32."""
    distributed, layers = load("distributed"), load("tensor_parallel")
    for module in modules:
        for parameter in module.parameters():
            layers.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    settings = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = [
        distributed.DistributedDataParallel(
            config=config, ddp_config=settings, module=module, disable_bucketing=index > 0
        )
        for index, module in enumerate(modules)
    ]
    config.finalize_model_grads_func = distributed.finalize_model_grads
    return Chunks(config, wrapped, modules)
