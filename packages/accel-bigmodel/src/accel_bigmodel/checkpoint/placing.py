"""Where each tensor of a model comes from and goes to, decided before anything moves; and moving it there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.compare import QUANTISED, SCALES, expected_tensors, find_sources
from accel_bigmodel.checkpoint.contents import CheckpointContents
from accel_bigmodel.checkpoint.pinned import DeviceCopier
from accel_bigmodel.checkpoint.progress import ByteProgress
from accel_bigmodel.tensors import set_module_tensor_to_device

CPU, META = torch.device("cpu"), torch.device("meta")
DISK = "disk"
NUM_READERS = min(8, os.cpu_count() or 1)
SMALL_BYTES = 1 << 24  # not worth starting threads for

DeviceMap = Mapping[str, int | str | torch.device]


@dataclass(frozen=True)
class Placement:
    """One tensor's way from the checkpoint into the model.

    Args:
        name: Its name in the model.
        source: Its name in the checkpoint.
        device: Where it is to be; the meta device for what stays on disk, or nowhere.
        dtype: What it is to be there.
        shape: Its sizes.
        is_viewed: It becomes a view of the mapped file, so nothing has to be read now.
        is_offloaded: It stays on disk.
        in_place: It is copied into the tensor that the model has already.
    """

    name: str
    source: str
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_viewed: bool
    is_offloaded: bool
    in_place: bool

    @property
    def num_bytes(self) -> int:
        """What it takes where it goes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Wishes:
    """What a caller asked for.

    Args:
        device_map: Device by name of module or tensor; None leaves each tensor where it is, in CPU memory if nowhere.
        dtype: Of floating-point tensors; as in the model when None, or as stored where the model has no values yet and
            there is no map.
        keep_in_fp32: Names of modules that stay in float32 when the others become float16.
        offload_buffers: Leave buffers on disk too.
    """

    device_map: DeviceMap | None = None
    dtype: torch.dtype | None = None
    keep_in_fp32: Sequence[str] = ()
    offload_buffers: bool = False


def plan_placements(model: nn.Module, contents: CheckpointContents, wishes: Wishes) -> list[Placement]:
    """Decide about each tensor that the checkpoint holds for a model; a tied parameter goes to each place once.

    Args:
        model: The model, which the checkpoint fits.
        contents: The checkpoint.
        wishes: What was asked for.
    """
    tensors = expected_tensors(model)
    takes_over = wishes.device_map is not None or any(tensor.is_meta for tensor in tensors.values())
    placements, seen = [], set()
    for name, source in find_sources(tensors, contents).items():
        placement = _place(name, source, tensors[name], contents, wishes, takes_over)
        here = (id(tensors[name]), placement.device)
        if placement.is_offloaded or here not in seen:
            placements.append(placement)
        seen.add(here)
    return placements


def _place(
    name: str, source: str, old: torch.Tensor, contents: CheckpointContents, wishes: Wishes, takes_over: bool
) -> Placement:
    stored = contents.dtype_and_shape(source)
    if stored is None:
        raise ValueError(f"The checkpoint {contents.source} holds no tensor under {source!r}.")
    stored_dtype, shape = stored
    place = device_of(name, wishes.device_map) if wishes.device_map is not None else None
    is_offloaded = place == DISK and (isinstance(old, nn.Parameter) or wishes.offload_buffers)
    if is_offloaded:
        device = META
    elif place == DISK:
        device = CPU
    else:
        device = torch.device(place) if place is not None else CPU if old.is_meta else old.device
    dtype = _dtype_of(name, old, stored_dtype, wishes, takes_over)
    in_place = not takes_over and dtype == old.dtype
    is_viewed = dtype == stored_dtype and device == CPU and not in_place
    return Placement(name, source, device, dtype, shape, is_viewed, is_offloaded, in_place)


def _dtype_of(name: str, old: torch.Tensor, stored: torch.dtype, wishes: Wishes, takes_over: bool) -> torch.dtype:
    if type(old).__name__ in QUANTISED:
        return stored
    if wishes.dtype is None:
        return stored if takes_over and wishes.device_map is None else old.dtype
    if not stored.is_floating_point:
        return stored if takes_over else old.dtype
    if wishes.dtype == torch.float16 and any(f"{part}." in name or part == name for part in wishes.keep_in_fp32):
        return torch.float32
    return wishes.dtype


def device_of(name: str, device_map: DeviceMap, default: Any = CPU) -> Any:
    """The device that a map gives to a tensor, by its own name or that of a module around it."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name, default)


def carry_out(
    model: nn.Module, contents: CheckpointContents, placements: Sequence[Placement], show_progress: bool = True
) -> None:
    """Put the tensors where they belong, those that have to be copied by several threads.

    Args:
        model: The model.
        contents: The checkpoint.
        placements: What `plan_placements` gave.
        show_progress: Show a bar if it takes long.
    """
    tensors, modules = expected_tensors(model), dict(model.named_modules(remove_duplicate=False))
    copied = []
    addresses: set[int] = set()
    for placement in placements:
        if placement.device == META:
            _assign(modules, placement, torch.empty(placement.shape, dtype=placement.dtype, device=META), contents)
        elif not placement.is_viewed:
            copied.append(placement)
        else:
            value = contents.tensor(placement.source).detach()
            if value.data_ptr() in addresses:  # one in a file of torch, but two in this model
                value = value.clone()
            elif value.numel():
                addresses.add(value.data_ptr())
            _assign(modules, placement, value, contents)

    copier = DeviceCopier()

    def read(placement: Placement) -> torch.Tensor:
        contents.read_ahead(placement.source)
        value = contents.tensor(placement.source).detach()
        with torch.no_grad():
            made = (
                tensors[placement.name].copy_(value)
                if placement.in_place
                else copier.copy(value, placement.device).to(placement.dtype)
                if placement.device.type == "cuda"
                else value.to(placement.device, placement.dtype, copy=True)
            )
        contents.forget(placement.source)
        return made

    total = sum(placement.num_bytes for placement in copied)
    with ByteProgress(total, "Loading weights", show_progress) as progress:
        for placement, value in zip(copied, _by_several(read, copied, total), strict=True):
            if not placement.in_place:
                _assign(modules, placement, value, contents)
            progress.advance(placement.num_bytes)


def _by_several(read: Any, placements: Sequence[Placement], total_bytes: int) -> Iterator[torch.Tensor]:
    if total_bytes < SMALL_BYTES or NUM_READERS == 1:
        yield from map(read, placements)
        return
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as readers:
        yield from readers.map(read, placements)


def _assign(
    modules: Mapping[str, nn.Module], placement: Placement, value: torch.Tensor, contents: CheckpointContents
) -> None:
    """Let a model have a tensor as it is."""
    path, _, leaf = placement.name.rpartition(".")
    owner = modules[path]
    old = owner._parameters.get(leaf)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    elif type(old) is nn.Parameter:
        differentiable = value.is_floating_point() or value.is_complex()
        made = nn.Parameter(value, requires_grad=old.requires_grad and differentiable)
        made.__dict__.update(old.__dict__)
        owner._parameters[leaf] = made
    else:
        scales = _scales_beside(placement, contents)
        set_module_tensor_to_device(owner, leaf, value.device, value, dtype=value.dtype, fp16_statistics=scales)


def _scales_beside(placement: Placement, contents: CheckpointContents) -> torch.Tensor | None:
    """What bitsandbytes needs besides an 8-bit weight."""
    name = scales_name(placement.source)
    return contents.tensor(name) if name in contents and placement.dtype == torch.int8 else None


def scales_name(weight_name: str) -> str:
    """Under which name bitsandbytes saves the scales of a weight."""
    owner, _, _ = weight_name.rpartition(".")
    return f"{owner}.{SCALES}" if owner else SCALES


__all__ = ["Placement", "Wishes", "carry_out", "device_of", "plan_placements", "scales_name"]
