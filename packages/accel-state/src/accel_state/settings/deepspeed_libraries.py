"""What transformers and DeepSpeed must know before a model is built: ZeRO-3 loading and leaf modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from accel_state.errors import missing_library
from accel_state.settings.deepspeed_auto import AUTO
from accel_state.settings.fsdp_torch import get_module_class_from_name
from accel_state.settings.option import wrong_value

if TYPE_CHECKING:
    from torch import nn


def register_with_transformers(config: Mapping[str, Any], *, sharded: bool) -> Any:
    """Register the configuration with transformers, so that `from_pretrained` shards parameters under ZeRO-3.

    Args:
        config: DeepSpeed's configuration; not changed.
        sharded: Whether parameters are sharded while a model is built.

    Returns:
        An object that keeps the configuration alive, because transformers holds only a weak reference to it; None where
        nothing is sharded.

    Raises:
        MissingLibraryError: When `sharded` and one of the libraries is not installed.
    """
    from accel_state.libraries import is_deepspeed_available, is_transformers_available

    present = {"transformers": is_transformers_available(), "deepspeed": is_deepspeed_available()}
    missing = [library for library, there in present.items() if not there]
    if missing and sharded:
        raise missing_library(missing[0], why="DeepSpeedPlugin(zero3_init_flag=True)")
    if missing:
        return None
    from transformers.integrations import HfDeepSpeedConfig as TransformersConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

    if not sharded:
        if is_deepspeed_zero3_enabled():  # by another plugin, or by this one before it was switched off
            unset_hf_deepspeed_config()
        return None
    visible: dict[str, Any] = deepcopy(dict(config))
    for key in (
        "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu",
    ):  # not known yet, but DeepSpeed checks them
        if visible.get(key, AUTO) == AUTO:
            visible[key] = 1
    if visible.get("train_batch_size") == AUTO:
        del visible["train_batch_size"]
    unset_hf_deepspeed_config()
    return TransformersConfig(visible)


def set_leaf_modules(model: nn.Module, class_names: Sequence[str]) -> None:
    """Mark mixture-of-experts layers as ZeRO-3 leaf modules, whose parameters are all-gathered together.

    Args:
        model: The model.
        class_names: The classes of these layers.

    Raises:
        MissingLibraryError: When DeepSpeed is not installed.
        ValueError: When a class does not occur in the model.
    """
    classes = [get_module_class_from_name(model, name) for name in class_names]
    for name, module_class in zip(class_names, classes, strict=True):
        if module_class is None:
            present = sorted({type(module).__name__ for module in model.modules()})
            expected = f"classes of modules in {type(model).__name__}"
            raise wrong_value("DeepSpeedPlugin.transformer_moe_cls_names", name, expected, present)
    from accel_state.libraries import is_deepspeed_available

    if not is_deepspeed_available():
        raise missing_library("deepspeed", extra="deepspeed", why="DeepSpeedPlugin.set_moe_leaf_modules")
    from deepspeed import utils

    functions: Any = utils
    functions.set_z3_leaf_modules(model, classes)
