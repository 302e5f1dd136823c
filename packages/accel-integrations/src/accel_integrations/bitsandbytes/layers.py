"""Replacing `nn.Linear` by quantized layers of bitsandbytes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_ops.tied import find_tied_parameters
from accel_state.errors import missing_library
from accel_state.libraries import is_bitsandbytes_multi_backend_available

if TYPE_CHECKING:
    from accel_integrations.bitsandbytes.settings import BnbQuantizationConfig


def library(why: str) -> Any:
    """The modules of bitsandbytes.

    Raises:
        MissingLibraryError: When bitsandbytes is not installed, in a version that supports CPUs, too.
    """
    if not is_bitsandbytes_multi_backend_available():
        raise missing_library("bitsandbytes", extra="bitsandbytes", why=why)
    import bitsandbytes

    return bitsandbytes.nn


def is_among(name: str, modules: Sequence[str]) -> bool:
    """Whether one of the names is that of a module or of a parent module, as in "lm_head" and "model.lm_head.proj"."""
    return any(f".{each}." in f".{name}." for each in modules)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Names of the modules that should not be quantized: the last one, and those that share parameters.

    Args:
        model: The model.

    Returns:
        The names; none for a model that is a base without a head (`base_model_prefix`).
    """
    shared = [
        name.removesuffix(".weight").removesuffix(".bias") for tied in find_tied_parameters(model) for name in tied
    ]
    prefix = getattr(model, "base_model_prefix", None)
    if not shared and isinstance(prefix, str) and not hasattr(model, prefix):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys([*shared, *last]))


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace linear layers by those of bitsandbytes, with the same weights, not quantized yet.

    bitsandbytes quantizes them when they are first moved to a device.

    Args:
        model: The model, materialized or on the meta device.
        bnb_quantization_config: The number of bits, and their options.
        modules_to_not_convert: Names of modules that stay as they are.
        current_key_name: The path to `model`, where it is a submodule of a larger one.

    Returns:
        The model.

    Raises:
        MissingLibraryError: When bitsandbytes is not installed.
    """
    layers = library("Quantizing a model")
    exclusions, path = modules_to_not_convert or (), current_key_name or ()
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear and name]
    for name, linear in linears:
        if not is_among(".".join([*path, name]), exclusions):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, _quantized_layer(layers, linear, bnb_quantization_config))
    return model


def _quantized_layer(layers: Any, linear: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    layer: Any
    with torch.device("meta"):
        if config.load_in_8bit:
            layer = layers.Linear8bitLt(*sizes, has_bias, has_fp16_weights=False, threshold=config.llm_int8_threshold)
        else:
            layer = layers.Linear4bit(
                *sizes,
                has_bias,
                compute_dtype=config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
    layer.weight = type(layer.weight)(linear.weight.data, requires_grad=False, **layer.weight.__dict__)
    layer.bias = linear.bias
    layer.requires_grad_(False)
    module: nn.Module = layer.train(linear.training)
    return module


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a model has linear layers that bitsandbytes quantizes to 4 bits.

    Args:
        model: The model.
    """
    layers: Any = sys.modules.get("bitsandbytes.nn")  # a model cannot have its layers when it is not imported
    return layers is not None and any(isinstance(module, layers.Linear4bit) for module in model.modules())


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of bitsandbytes that a model has, by name."""
    layers: Any = sys.modules.get("bitsandbytes.nn")
    if layers is None:
        return {}
    kinds = (layers.Linear8bitLt, layers.Linear4bit)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
