"""Parameters that several modules share."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.sizes import walk

META = torch.device("meta")
logger = logging.getLogger("accelerate.utils.modeling")


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The parameters that are known under several names.

    Args:
        model: The model, which may be on the meta device.
        kwargs: Taken for the sake of older programs, and not used.

    Returns:
        For each of these parameters its names, sorted; the parameters are in the model's order.

    Example:
        ```python
        find_tied_parameters(gpt2)  # [["lm_head.weight", "transformer.wte.weight"]]
        ```
    """
    places: dict[int, list[tuple[str, str]]] = {}
    for path, module in walk(model, repeat_shared=True):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((path, key))
    groups = (group for group in places.values() if len(group) > 1)
    return [sorted(f"{path}.{key}" if path else key for path, key in group) for group in groups]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make names one parameter again, after each has been loaded by itself; those on several devices stay several.

    Args:
        model: The model.
        tied_params: What `find_tied_parameters` gave.
    """
    for group in tied_params:
        found = {name: _find(model, name) for name in group}
        values = [parameter for parameter in found.values() if parameter is not None]
        if not values:
            continue
        kept = next((value for value in values if value.device.type != "meta"), values[0])
        for name, parameter in found.items():
            if parameter is not None and parameter is not kept and parameter.device in (kept.device, META):
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, kept)


def _find(model: nn.Module, name: str) -> nn.Parameter | None:
    owner, _, last = name.rpartition(".")
    try:
        return model.get_submodule(owner)._parameters.get(last)
    except AttributeError:
        return None


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the configuration of a transformers model says that it shares parameters."""
    if "PreTrainedModel" not in [kind.__name__ for kind in type(model).__mro__]:
        return False
    config: Any = getattr(model, "config", None)
    decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = getattr(decoder, "tie_word_embeddings", False) and callable(
        getattr(model, "get_output_embeddings", None)
    )
    if embeddings and model.get_output_embeddings() is None:  # type: ignore[operator]
        embeddings = False
    encoder_decoder = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(embeddings or encoder_decoder or any(hasattr(part, "_tie_weights") for part in model.modules()))


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn about parameters that share memory but are to be put on several devices.

    Args:
        tied_params: What `find_tied_parameters` gave.
        device_map: Where each part of the model goes.
    """
    for group in tied_params:
        places = {name: _place_of(name, device_map) for name in group}
        if len(set(places.values())) > 1:
            logger.warning(
                "These names share one parameter, but the device map puts them on several devices, where each gets a "
                "copy of its own: %s. Give their modules one device.",
                places,
            )


def _place_of(name: str, device_map: Mapping[str, Any]) -> Any:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)
