"""8-bit floats with Transformer Engine: its layers in float8, everything else in bfloat16."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.precision.autocast import AutocastForward, AutocastPrecision
from accel_state.errors import missing_library
from accel_state.hardware import is_hpu_available
from accel_state.libraries import is_transformer_engine_available
from accel_state.settings.fp8 import TERecipeKwargs
from accel_state.settings.handlers import Handlers

if TYPE_CHECKING:
    from accel_state.settings.fp8 import TERecipeKwargs


BLOCK = 16  # sizes that 8-bit matrix products take are multiples of it
DELAYED_SCALING: dict[str, Any] = {
    "margin": 0,
    "interval": 1,
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, False),
}
"""The arguments of `DelayedScaling`, in one version or another, with their defaults."""
PYTORCH_DISTRIBUTION = "transformer-engine[pytorch]"


def library(why: str) -> Any:
    """The layers of Transformer Engine for torch, NVIDIA's or (on Gaudi) Intel's.

    Raises:
        MissingLibraryError: When it is not installed.
    """
    if not is_transformer_engine_available():
        raise missing_library(PYTORCH_DISTRIBUTION, why=why)
    if is_hpu_available():
        return import_module("intel_transformer_engine")
    import transformer_engine.pytorch

    return transformer_engine.pytorch


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace linear and layer-norm layers by those of Transformer Engine, or back. Changes `model`.

    Linear layers whose sizes are no multiples of 16 stay as they are.

    Args:
        model: The model.
        to_transformer_engine (`bool`): False puts torch's layers back.
        _convert_linear (`bool`): Whether to replace linear layers.
        _convert_ln (`bool`): Whether to replace layer norms.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
    """
    engine = library("convert_model()")
    requested = {"Linear": _convert_linear, "LayerNorm": _convert_ln}
    pairs = [(getattr(nn, name), getattr(engine, name, None), name) for name, asked in requested.items() if asked]
    for name, module in list(model.named_children()):
        for ours, theirs, kind in pairs:
            source, target = (ours, theirs) if to_transformer_engine else (theirs, ours)
            if source is not None and target is not None and type(module) is source and CAN_BE_MADE[kind](module):
                setattr(model, name, _remade(module, target, kind))
                break
        else:
            convert_model(module, to_transformer_engine, _convert_linear, _convert_ln)


def _fits(linear: Any) -> bool:
    return linear.in_features % BLOCK == 0 and linear.out_features % BLOCK == 0


def _has_values(norm: Any) -> bool:
    """A layer norm of Transformer Engine has always a weight and a bias."""
    return norm.weight is not None and norm.bias is not None


CAN_BE_MADE: dict[str, Callable[[Any], bool]] = {"Linear": _fits, "LayerNorm": _has_values}


def _remade(module: Any, target: Any, kind: str) -> nn.Module:
    """A layer of another library around the same parameters, so that optimizers keep them."""
    weight, bias = module.weight, _bias_of(module)
    of_torch = target in (nn.Linear, nn.LayerNorm)
    options = {"dtype" if of_torch else "params_dtype": weight.dtype}
    if of_torch or weight.device.type != "cpu":  # the library makes its layers on accelerators, or without values
        options["device"] = weight.device
    if kind == "Linear":
        new_layer = target(module.in_features, module.out_features, bias=bias is not None, **options)
    else:
        new_layer = target(getattr(module, "normalized_shape", tuple(weight.shape)), eps=module.eps, **options)
    new_layer.weight = weight
    if bias is not None:
        new_layer.bias = bias
    layer: nn.Module = new_layer.train(module.training)
    return layer


def _bias_of(module: Any) -> Any:
    """The bias; layers of Transformer Engine that have none hold an empty tensor."""
    bias = module.bias
    return bias if isinstance(bias, torch.Tensor) and bias.numel() else None


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether layers of a model are Transformer Engine's.

    Args:
        model: The model.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
    """
    if not is_transformer_engine_available():
        raise missing_library(PYTORCH_DISTRIBUTION, why="has_transformer_engine_layers()")
    package: Any = sys.modules.get("transformer_engine.pytorch") or sys.modules.get("intel_transformer_engine")
    kinds = tuple(
        getattr(package, name) for name in ("LayerNorm", "Linear", "TransformerLayer") if hasattr(package, name)
    )
    return any(isinstance(module, kinds) for module in model.modules())


class FP8Forward:
    """A forward that runs in Transformer Engine's 8-bit context; replaces `model.forward`.

    Args:
        forward: The forward to call.
        recipe: How 8-bit floats are scaled.
        use_during_eval: Whether to compute in 8 bits in evaluation too.
    """

    def __init__(self, forward: Callable[..., Any], recipe: Any, use_during_eval: bool = False) -> None:
        self.__wrapped__ = forward  # signatures are read through it
        self.__name__ = "forward"
        self.recipe = recipe
        self.use_during_eval = use_during_eval

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a model."""
        model = getattr(self.__wrapped__, "__self__", args[0] if args else None)
        enabled = self.use_during_eval or bool(getattr(model, "training", True))
        with fp8_context(self.recipe, enabled):
            return self.__wrapped__(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Be a method when it is set on a class."""
        return self if instance is None else MethodType(self, instance)


def fp8_context(recipe: Any, enabled: bool = True) -> AbstractContextManager[Any]:
    """The context in which layers of Transformer Engine compute in 8 bits."""
    engine = library("FP8")
    if hasattr(engine, "autocast"):  # its name since 2.9
        context: AbstractContextManager[Any] = engine.autocast(enabled=enabled, recipe=recipe)
    else:
        context = engine.fp8_autocast(enabled=enabled, fp8_recipe=recipe)
    return context


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A forward that runs in 8 bits while its model trains.

    Args:
        model_forward: The forward, bound to its model or not.
        fp8_recipe (`transformer_engine.common.recipe.Recipe`): How 8-bit floats are scaled.
        use_during_eval (`bool`): Whether to compute in 8 bits in evaluation too.

    Returns:
        The forward, to be set on the model.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
    """
    library("contextual_fp8_autocast()")
    return FP8Forward(model_forward, fp8_recipe, use_during_eval)


def make_recipe(handler: TERecipeKwargs) -> Any:
    """The object in which Transformer Engine takes these settings.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
        ValueError: When the installed version no longer has an argument that was set.
    """
    library("TERecipeKwargs")
    package = "intel_transformer_engine" if is_hpu_available() else "transformer_engine.common"
    recipes: Any = import_module(f"{package}.recipe")
    layout = getattr(recipes.Format, handler.fp8_format)
    if handler.use_mxfp8_block_scaling:
        return recipes.MXFP8BlockScaling(fp8_format=layout, margin=handler.margin)
    parameters = inspect.signature(recipes.DelayedScaling).parameters
    options = {name: getattr(handler, name) for name in DELAYED_SCALING}
    changed = [
        name for name, default in DELAYED_SCALING.items() if name not in parameters and options[name] != default
    ]
    if changed:
        raise ValueError(
            f"The installed Transformer Engine does not support {' and '.join(changed)}. Leave that out of "
            "TERecipeKwargs."
        )
    return recipes.DelayedScaling(fp8_format=layout, **{name: options[name] for name in options if name in parameters})


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Let the forward of a model run in 8 bits.

    Args:
        model: The model, with layers of Transformer Engine.
        fp8_recipe_handler (`TERecipeKwargs`, *optional*): How 8-bit floats are scaled.

    Returns:
        The model.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
    """
    library("apply_fp8_autowrap()")
    if fp8_recipe_handler is None:
        from accel_state.settings.fp8 import TERecipeKwargs

        fp8_recipe_handler = TERecipeKwargs()
    recipe = make_recipe(fp8_recipe_handler)
    forward = FP8Forward(model.forward, recipe, bool(fp8_recipe_handler.use_autocast_during_eval))
    # past `__setattr__`, by which compiled modules would set it on the module inside
    model.__dict__["forward"] = forward
    return model


@final
class TransformerEnginePrecision(AutocastPrecision):
    """Linear layers and layer norms of Transformer Engine, in float8 while the model trains; outputs are float32.

    A model that has layers of Transformer Engine already keeps them and gets no others.

    Args:
        device_type: The type of device to compute on.
        handlers: May hold how 8-bit floats are scaled, and how autocast behaves.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
    """

    name = "fp8"

    def __init__(self, device_type: str, handlers: Handlers) -> None:
        super().__init__(device_type, handlers)
        self._recipe = handlers.fp8 if isinstance(handlers.fp8, TERecipeKwargs) else TERecipeKwargs()

    @override
    def convert(self, model: nn.Module) -> nn.Module:
        """Replace layers of torch by those of Transformer Engine."""
        if not has_transformer_engine_layers(model):
            with torch.no_grad():
                convert_model(model)
        return model

    @override
    def wrap_forward(self, model: nn.Module) -> nn.Module:
        """Let `model.forward` run in 8 bits, and what cannot under autocast."""
        if isinstance(model.forward, AutocastForward):  # of an earlier preparation
            return model
        plain = model.forward
        apply_fp8_autowrap(model, self._recipe)
        super().wrap_forward(model)
        model.__dict__["_original_forward"] = plain
        return model
