"""Checking a device map against the model, the devices of this machine, and their memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.device_map.modules import holder_of
from accel_bigmodel.sizes import named_module_tensors
from accel_state.devices import detect_device_kind, resolve_device
from accel_state.guessing import closest
from accel_state.warning import warn_user

ALWAYS_USABLE = ("cpu", "meta")  # devices that every machine has
logger = logging.getLogger("accelerate.utils.modeling")


def check_device_map(model: nn.Module, device_map: Mapping[str, Any], strict: bool = False) -> None:
    """Raise an error for a device map that leaves out a tensor of the model, and warn of names that the model has not.

    Args:
        model: The model.
        device_map: Device by name of module or tensor; `""` is the model.
        strict (`bool`): Raise an error for such names too.

    Raises:
        ValueError: Listing the names.
    """
    tensors = list(model.state_dict())
    names = {name for name, _ in model.named_modules()} | set(tensors)
    names |= {name for name, _ in model.named_buffers()}
    unknown = [name for name in device_map if name not in names]
    if unknown:
        close = closest(unknown[0], sorted(names))
        hint = f" Did you mean {close!r}?" if close else ""
        message = (
            f"These device_map keys do not match any submodules of {type(model).__name__}: {_listed(unknown)}.{hint}"
        )
        if strict:
            raise ValueError(message)
        warn_user(message)
    if "" in device_map:
        return
    missing = [name for name in tensors if not holder_of(name, device_map)]
    if missing:
        raise ValueError(
            f"The device map has no device for {_listed(missing)}: add these names, or modules that hold them."
        )


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are the same; an accelerator without an index is the first."""
    if first_device.type != second_device.type:
        return False
    if first_device.type in ("cpu", "meta"):
        return True
    return (first_device.index or 0) == (second_device.index or 0)


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def check_places(device_map: Mapping[str, Any]) -> None:
    """Raise an error for a device map whose keys are not names, or whose values are not devices of this machine.

    Args:
        device_map: Device, or `"disk"`, by name of module or tensor.

    Raises:
        TypeError: It is not a mapping.
        ValueError: Naming the first entry that cannot be used, and the reason.
    """
    if not isinstance(device_map, Mapping):
        raise TypeError(
            f"device_map={device_map!r} is not a mapping from module names to devices. To put the whole model on one "
            "device, pass {'': device}."
        )
    usable: set[torch.device] = set()
    for name, place in device_map.items():
        if not isinstance(name, str):
            raise ValueError(f"The device map has the key {name!r}: keys must be names of modules or tensors, as str.")
        if place == "disk":
            continue
        device = _device_of(name, place)
        if device not in usable:
            check_usable(device, name)
            usable.add(device)


def check_usable(device: torch.device, name: str = "") -> None:
    """Raise an error for a device that this machine does not have.

    Args:
        device: The device.
        name: The module that the device map puts there, for the error.

    Raises:
        ValueError: Naming the device, and those of this machine.
    """
    if device.type in ALWAYS_USABLE:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        kind = detect_device_kind()
        count = 0 if kind.name == "cpu" else kind.device_count()
        here = f"{count} {kind.name} device{'s' * (count != 1)}" if count else "no accelerator"
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"The device map names {str(device)!r}{f' for {name!r}' if name else ''}, which is not available: this machine "
            f"has {here} ({reason}). Use 'cpu' or 'disk', or let device_map='auto' choose."
        ) from None  # torch's error is the reason in the brackets


def _device_of(name: str, place: Any) -> torch.device:
    wrong = f"The device map puts {name!r} on {place!r}, which is not a device"
    advice = "use the index of an accelerator, 'cpu', 'disk', or what torch.device takes."
    if isinstance(place, bool) or not isinstance(place, int | str | torch.device):
        raise ValueError(f"{wrong}: {advice}")
    try:
        return torch.device(place)
    except RuntimeError as error:
        raise ValueError(f"{wrong} ({str(error).partition(chr(10))[0][:60]}): {advice}") from None


def check_memory(needed: Mapping[torch.device, int]) -> None:
    """Raise an error, before anything moves, if a device has not enough free memory.

    Args:
        needed: Bytes that will be moved to each device.

    Raises:
        ValueError: Naming the devices, and how many bytes are too many.
    """
    lacking = []
    for device, num_bytes in needed.items():
        free = free_bytes(device) if num_bytes else None
        if free is not None and num_bytes > free:
            lacking.append(
                f"{num_bytes / 1e9:.2f} GB are to go to {device}, where {free / 1e9:.2f} GB are free: "
                f"{(num_bytes - free) / 1e9:.2f} GB too many"
            )
    if lacking:
        raise ValueError(
            f"The device map does not fit into memory: {'; '.join(lacking)}. Let infer_auto_device_map make a map for "
            "the free memory (max_memory), or assign more modules to 'disk' or to another device."
        )


def free_bytes(device: torch.device) -> int | None:
    """The free bytes of a device; None where it cannot be asked."""
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available + psutil.swap_memory().free)
    module: Any = torch.get_device_module(device) if device.type != "meta" else None
    if not hasattr(module, "mem_get_info") or not module.is_available():
        return None
    unused = module.memory_reserved(device) - module.memory_allocated(device)  # which torch keeps for new tensors
    return int(module.mem_get_info(device)[0] + unused)


def bytes_to_move(model: nn.Module, devices: Mapping[str, Any]) -> dict[torch.device, int]:
    """Bytes that are moved to each device when a model is placed by a device map; tied tensors count once.

    Args:
        model: The model, in memory.
        devices: Device by module name; modules that are left out are not moved.
    """
    bytes_by_device: dict[torch.device, int] = {}
    seen: set[tuple[int, torch.device]] = set()
    for name, tensor in named_module_tensors(model, recurse=True):
        holder = holder_of(name, devices)
        if holder not in devices or tensor.is_meta:
            continue
        device = resolve_device(devices[holder])
        if device != tensor.device and (tensor.data_ptr(), device) not in seen:
            seen.add((tensor.data_ptr(), device))
            bytes_by_device[device] = bytes_by_device.get(device, 0) + tensor.nbytes
    return bytes_by_device


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the config of a transformers model says that its weights are tied."""
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
    return bool(embeddings or encoder_decoder or any(hasattr(module, "_tie_weights") for module in model.modules()))


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn about tied parameters that a device map puts on several devices.

    Args:
        tied_params: What `find_tied_parameters` gave.
        device_map: Device by name of module or tensor.
    """
    for group in tied_params:
        places = {name: device_map.get(holder_of(name, device_map)) for name in group}
        if len({place if place in (None, "disk") else resolve_device(place) for place in places.values()}) > 1:
            logger.warning(
                "The device map puts tied parameters on several devices, where each gets a "
                "copy of its own: %s. Give their modules one device.",
                places,
            )
