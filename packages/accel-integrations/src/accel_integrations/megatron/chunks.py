"""Building this rank's chunks of a model with megatron-core's local layers, wrapped for data parallelism."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_integrations.megatron.core import define_router_gemm, load
from accel_integrations.megatron.families.chunk import Stage
from accel_integrations.megatron.fields import NOT_OF_CONFIG

if TYPE_CHECKING:
    from accel_integrations.megatron.families.shape import ModelShape
    from accel_integrations.megatron.groups import Degrees
    from accel_state.settings.megatron import MegatronLMPlugin

Provider = Callable[..., Any]
LAYER = re.compile(r"(decoder|encoder)\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
OFF = ("gradient_accumulation_fusion", "bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion",
       "apply_rope_fusion", "persist_layer_norm", "cross_entropy_loss_fusion")  # fmt: skip
"""Options that need kernels of Apex or Transformer Engine."""
DECIDED: Mapping[str, tuple[str, ...]] = {
    "the degrees of MegatronLMPlugin": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    ),
    "MegatronLMPlugin.sequence_parallelism": ("sequence_parallel",),
    "MegatronLMPlugin.calculate_per_token_loss": ("calculate_per_token_loss",),
    "the model and mixed_precision": ("bf16", "fp16", "params_dtype", "pipeline_dtype"),
    "the model": (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
        "num_moe_experts", "moe_ffn_hidden_size", "activation_func",
    ),
    "the layers, which are megatron-core's local ones": ("transformer_impl", "fp8", "fp4"),
}  # fmt: skip
"""Fields of megatron-core's configuration that `other_megatron_args` cannot change, by what they follow from."""


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
        parameters = {}
        for module in self.modules:
            blocks = {name: getattr(module, name, None) for name in ("encoder", "decoder")}
            numbers = {
                name: [layer.layer_number - 1 for layer in block.layers] for name, block in blocks.items() if block
            }
            for name, parameter in module.named_parameters():
                parameters[_full_name(name, numbers, self._first_expert())] = parameter
        return parameters

    def _first_expert(self) -> int:
        if self.config.num_moe_experts is None:
            return 0
        parallel = load("parallel_state")
        here = self.config.num_moe_experts // parallel.get_expert_model_parallel_world_size()
        return int(parallel.get_expert_model_parallel_rank() * here)


def _full_name(name: str, numbers: Mapping[str, list[int]], first_expert: int) -> str:
    """The name of a parameter, with layers and experts numbered as in the full model."""
    name = LAYER.sub(lambda match: f"{match[1]}.layers.{numbers[match[1]][int(match[2])]}.", name)
    return EXPERT.sub(lambda match: f".local_experts.{first_expert + int(match[1])}.", name)


def make_config(
    shape: ModelShape,
    plugin: MegatronLMPlugin,
    degrees: Degrees,
    dtype: torch.dtype,
    device: torch.device,
    *,
    per_token: bool,
) -> Any:
    """megatron-core's configuration of a model.

    Args:
        shape: The model.
        plugin: The settings of the run.
        degrees: The parallelism degrees.
        dtype: That of parameters and activations.
        device: Where it will be trained.
        per_token: Whether the loss of a step is the mean over tokens, not over micro-batches.

    Raises:
        ValueError: `other_megatron_args` has a name that megatron-core does not know, or that is decided elsewhere.
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
        "context_parallel_size": degrees.context,
        "expert_model_parallel_size": degrees.expert,
        "expert_tensor_parallel_size": degrees.expert_tensor,
        "virtual_pipeline_model_parallel_size": virtual if interleaved else None,
        "overlap_p2p_comm": interleaved,  # with two stages, batched messages of both directions would be mixed up
        "batch_p2p_comm": not interleaved,
        "sequence_parallel": plugin.sequence_parallelism and degrees.tensor > 1,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
        "calculate_per_token_loss": per_token,
        "transformer_impl": "local",
        **dict.fromkeys(OFF, False),
        **shape.layers,
        **_recomputation(plugin),
    }
    if shape.num_experts is not None:
        define_router_gemm()
        # the dispatcher that sends less works with CUDA streams
        options["moe_token_dispatcher_type"] = "allgather" if device.type == "cpu" else "alltoall"
    if plugin.decoder_last_pipeline_num_layers is not None and degrees.pipeline > 1:
        options["num_layers_in_last_pipeline_stage"] = plugin.decoder_last_pipeline_num_layers
    others = {name: value for name, value in (plugin.other_megatron_args or {}).items() if name not in NOT_OF_CONFIG}
    _check_others(others, kind.__dataclass_fields__, options)
    return kind(**options | others)


def _check_others(others: Mapping[str, Any], fields: Collection[str], options: Mapping[str, Any]) -> None:
    """Check that `other_megatron_args` has known names only, and changes nothing that is decided elsewhere."""
    if unknown := sorted(set(others) - set(fields)):
        raise ValueError(
            f"MegatronLMPlugin.other_megatron_args has {', '.join(map(repr, unknown))}, which megatron-core's "
            "TransformerConfig does not have. Leave it out, or use the field of MegatronLMPlugin for it."
        )
    for reason, names in DECIDED.items():
        for name in names:
            if name in others and others[name] != options.get(name):
                raise ValueError(
                    f"MegatronLMPlugin.other_megatron_args has {name}={others[name]!r}, but that follows from {reason}. Leave it "
                    "out."
                )


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


def build(
    shape: ModelShape, config: Any, degrees: Degrees, device: torch.device, provider: Provider | None = None
) -> list[Any]:
    """This rank's chunks, with weights that are still to be loaded.

    Args:
        shape: The model.
        config: megatron-core's configuration of it.
        degrees: The parallelism degrees.
        device: Where the chunks go.
        provider: A function of the program that makes a chunk (`custom_model_provider_function`).
    """
    parallel = load("parallel_state")
    virtual = config.virtual_pipeline_model_parallel_size
    parallel.set_virtual_pipeline_model_parallel_world_size(virtual)
    chunks = []
    for number in range(virtual or 1):
        vp_stage = None if virtual is None else number
        stage = Stage(
            vp_stage,
            parallel.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        )
        if provider is None:
            chunk = shape.chunk(shape, config, stage, shape.num_rows(degrees))
        else:
            chunk = _provided(provider, config, stage)
        chunk.model_type = load("enums").ModelType.encoder_or_decoder
        if stage.is_last:
            _hide_padding(shape, degrees, chunk)
        chunks.append(chunk.to(device=device, dtype=config.params_dtype))
    return chunks


def _hide_padding(shape: ModelShape, degrees: Degrees, chunk: Any) -> None:
    """Keep rows which only pad the vocabulary out of the softmax."""
    parallel, num_tokens = load("parallel_state"), shape.num_tokens
    if shape.num_rows(degrees) == num_tokens:
        return

    def hide(module: Any, inputs: Any, outputs: Any) -> Any:
        logits, bias = outputs  # (sequence, batch, tokens of this rank)
        first = parallel.get_tensor_model_parallel_rank() * logits.shape[-1]
        padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= num_tokens
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min / 2), bias

    chunk.output_layer.register_forward_hook(hide)


def _provided(provider: Provider, config: Any, stage: Stage) -> Any:
    """A chunk that a function of the program makes, from those arguments of Megatron-LM that it takes."""
    arguments = {"add_encoder": True, "add_decoder": True, "config": config, **stage.options()}
    taken = inspect.signature(provider).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in taken):
        arguments = {one.name: arguments[one.name] for one in taken if one.name in arguments}
    return provider(**arguments)


def wrap(config: Any, modules: list[Any]) -> Chunks:
    """Wrap chunks so that gradients are averaged over replicas, in float32."""
    distributed, layers = load("distributed"), load("tensor_parallel")
    for module in modules:
        for name, parameter in module.named_parameters():
            layers.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            if EXPERT.search(name):  # tensor-parallel ranks send them other tokens, so that their gradients are summed
                parameter.allreduce = False
    settings = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = [
        distributed.DistributedDataParallel(
            config=config, ddp_config=settings, module=module, disable_bucketing=index > 0
        )
        for index, module in enumerate(modules)
    ]
    config.finalize_model_grads_func = distributed.finalize_model_grads
    return Chunks(config, wrapped, modules)


def own_chunks(
    shape: ModelShape, degrees: Degrees, prepare: Callable[[Provider], Any], provider: Provider, *, per_token: bool
) -> Chunks:
    """The chunks that a function of the program builds and wraps (`custom_prepare_model_function`).

    Args:
        shape: The model.
        degrees: The parallelism degrees.
        prepare: The function, which takes the other one.
        provider: Makes a chunk (`custom_model_provider_function`).
        per_token: As for `make_config`.

    Raises:
        TypeError: It returned anything but chunks in `DistributedDataParallel` of megatron-core.
    """
    distributed = load("distributed")
    chunks = prepare(provider)
    wrapped = chunks if isinstance(chunks, list) else [chunks]
    if wrong := [type(one).__name__ for one in wrapped if not isinstance(one, distributed.DistributedDataParallel)]:
        raise TypeError(
            f"custom_prepare_model_function returned {', '.join(wrong)}. Return a list of chunks, each in "
            "megatron.core.distributed.DistributedDataParallel."
        )
    for one in wrapped:
        if one.module.post_process:
            _hide_padding(shape, degrees, one.module)
    config = wrapped[0].config
    config.calculate_per_token_loss = per_token
    config.finalize_model_grads_func = distributed.finalize_model_grads
    return Chunks(config, wrapped, [one.module for one in wrapped])
