"""Planning from which tensor of a checkpoint, and on which device, each tensor of a model is loaded; and loading it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from accel_bigmodel.checkpoint.compare import QUANTISED, SCALES, expected_tensors, find_sources
from accel_bigmodel.checkpoint.contents import CheckpointContents
from accel_bigmodel.checkpoint.progress import ByteProgress
from accel_bigmodel.tensors import set_module_tensor_to_device
from accel_state.devices import resolve_device

CPU, META = torch.device("cpu"), torch.device("meta")
DISK = "disk"
NUM_READERS = min(8, os.cpu_count() or 1)
SMALL_BYTES = 1 << 24  # not worth starting threads for
BUFFER_BYTES = 1 << 24
DIRECT_COPY_BYTES = 1 << 20  # below this the driver's own staging is as fast

DeviceMap = Mapping[str, int | str | torch.device]


@dataclass(frozen=True)
class Placement:
    """How one tensor is loaded from the checkpoint into the model.

    Args:
        name: Its name in the model.
        source: Its name in the checkpoint.
        device: Its device; the meta device if it stays on disk.
        dtype: Its dtype there.
        shape: Its shape.
        is_viewed: It becomes a view of the memory-mapped file, so nothing has to be read now.
        is_offloaded: It stays on disk.
        in_place: It is copied into the model's existing tensor.
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
        """Its size on the target device."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is to be loaded.

    Args:
        device_map: Device by name of module or tensor; None keeps each tensor's device, and means CPU for the meta device.
        dtype: Of floating-point tensors; as in the model when None, or as stored where the model is on the meta device and
            there is no map.
        keep_in_fp32: Names of modules that stay in float32 when the others are converted to float16.
        offload_buffers: Offload buffers to disk too.
    """

    device_map: DeviceMap | None = None
    dtype: torch.dtype | None = None
    keep_in_fp32: Sequence[str] = ()
    offload_buffers: bool = False


def plan_placements(model: nn.Module, contents: CheckpointContents, options: LoadOptions) -> list[Placement]:
    """Plan how each tensor that the checkpoint has for a model is loaded; a tied parameter goes to each device once.

    Args:
        model: The model, which the checkpoint matches.
        contents: The checkpoint.
        options: How to load.
    """
    tensors = expected_tensors(model)
    assign = options.device_map is not None or any(tensor.is_meta for tensor in tensors.values())
    placements, seen = [], set()
    for name, source in find_sources(tensors, contents).items():
        placement = _place(name, source, tensors[name], contents, options, assign)
        here = (id(tensors[name]), placement.device)
        if placement.is_offloaded or here not in seen:
            placements.append(placement)
        seen.add(here)
    return placements


def _place(
    name: str, source: str, old: torch.Tensor, contents: CheckpointContents, options: LoadOptions, assign: bool
) -> Placement:
    stored = contents.dtype_and_shape(source)
    if stored is None:
        raise ValueError(f"The checkpoint {contents.source} holds no tensor under {source!r}.")
    stored_dtype, shape = stored
    place = device_of(name, options.device_map) if options.device_map is not None else None
    is_offloaded = place == DISK and (isinstance(old, nn.Parameter) or options.offload_buffers)
    if is_offloaded:
        device = META
    elif place == DISK:
        device = CPU
    else:
        device = resolve_device(place) if place is not None else CPU if old.is_meta else old.device
    dtype = _dtype_of(name, old, stored_dtype, options, assign)
    in_place = not assign and dtype == old.dtype
    is_viewed = dtype == stored_dtype and device == CPU and not in_place
    return Placement(name, source, device, dtype, shape, is_viewed, is_offloaded, in_place)


def _dtype_of(name: str, old: torch.Tensor, stored: torch.dtype, options: LoadOptions, assign: bool) -> torch.dtype:
    if type(old).__name__ in QUANTISED:
        return stored
    if options.dtype is None:
        return stored if assign and options.device_map is None else old.dtype
    if not stored.is_floating_point:
        return stored if assign else old.dtype
    if options.dtype == torch.float16 and any(
        f"{module}." in name or module == name for module in options.keep_in_fp32
    ):
        return torch.float32
    return options.dtype


def device_of(name: str, device_map: DeviceMap, default: Any = CPU) -> Any:
    """The device that a map gives to a tensor, by its own name or that of a parent module."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name, default)


def load_tensors(
    model: nn.Module, contents: CheckpointContents, placements: Sequence[Placement], show_progress: bool = True
) -> None:
    """Load the tensors into the model; several threads make the copies.

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
            if value.data_ptr() in addresses:  # tied in a file of torch, but not in this model
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
        for placement, value in zip(copied, _in_threads(read, copied, total), strict=True):
            if not placement.in_place:
                _assign(modules, placement, value, contents)
            progress.advance(placement.num_bytes)


def _in_threads(read: Any, placements: Sequence[Placement], total_bytes: int) -> Iterator[torch.Tensor]:
    if total_bytes < SMALL_BYTES or NUM_READERS == 1:
        yield from map(read, placements)
        return
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as readers:
        yield from readers.map(read, placements)


def _assign(
    modules: Mapping[str, nn.Module], placement: Placement, value: torch.Tensor, contents: CheckpointContents
) -> None:
    """Assign a tensor to the model without a copy."""
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
        scales = _scales_of(placement, contents)
        set_module_tensor_to_device(owner, leaf, value.device, value, dtype=value.dtype, fp16_statistics=scales)


def _scales_of(placement: Placement, contents: CheckpointContents) -> torch.Tensor | None:
    """The scales that bitsandbytes needs for an 8-bit weight."""
    name = scales_name(placement.source)
    return contents.tensor(name) if name in contents and placement.dtype == torch.int8 else None


def scales_name(weight_name: str) -> str:
    """The name under which bitsandbytes saves the scales of a weight."""
    owner, _, _ = weight_name.rpartition(".")
    return f"{owner}.{SCALES}" if owner else SCALES


# ---- copies from memory-mapped files to an accelerator through pinned buffers ----------------------------------------


class StagingBuffer(Protocol):
    """A pinned buffer that a device copies from asynchronously, while the next one is filled."""

    buffer: torch.Tensor

    def wait(self) -> None:
        """Block until the buffer may be filled again."""

    def send(self, target: torch.Tensor) -> None:
        """Start copying the first bytes of the buffer to a target (uint8, one dimension)."""


class CudaStagingBuffer:
    """A pinned buffer that is copied to one CUDA device on a CUDA stream of its own.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(device)
        self._sent = torch.cuda.Event()

    def wait(self) -> None:
        """Block until the buffer may be filled again."""
        self._sent.synchronize()

    def send(self, target: torch.Tensor) -> None:
        """Start copying the first bytes of the buffer to a target (uint8, one dimension)."""
        self._stream.wait_stream(torch.cuda.current_stream(target.device))  # on which its memory was used before
        with torch.cuda.device(target.device), torch.cuda.stream(self._stream):  # the thread's device is GPU 0
            target.copy_(self.buffer[: target.numel()], non_blocking=True)
            self._sent.record(self._stream)


class DeviceCopier:
    """Copies tensors to CUDA devices; each thread that uses it has two pinned buffers for each device."""

    def __init__(self) -> None:
        self._here = threading.local()

    def copy(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor in CPU memory to a device; the copy has ended when this returns.

        Args:
            value: The tensor.
            device: A CUDA device.
        """
        if value.numel() * value.element_size() < DIRECT_COPY_BYTES:
            return value.to(device, copy=True)
        made = torch.empty(value.shape, dtype=value.dtype, device=device)
        copy_staged(value.contiguous(), made, self._buffers(device))
        return made

    def _buffers(self, device: torch.device) -> Sequence[StagingBuffer]:
        if not hasattr(self._here, "buffers"):
            self._here.buffers = {}
        buffers: dict[torch.device, Sequence[StagingBuffer]] = self._here.buffers
        if device not in buffers:
            buffers[device] = CudaStagingBuffer(device), CudaStagingBuffer(device)
        return buffers[device]


def copy_staged(source: torch.Tensor, target: torch.Tensor, buffers: Sequence[StagingBuffer]) -> None:
    """Copy a contiguous tensor chunk by chunk, filling one buffer while the others are copied."""
    source_bytes, target_bytes = (each.reshape(-1).view(torch.uint8) for each in (source, target))
    step = buffers[0].buffer.numel()
    for number, begin in enumerate(range(0, source_bytes.numel(), step)):
        staging = buffers[number % len(buffers)]
        chunk = source_bytes[begin : begin + step]
        staging.wait()
        staging.buffer[: chunk.numel()].copy_(chunk)
        staging.send(target_bytes[begin : begin + step])
    for staging in buffers:
        staging.wait()


__all__ = ["Placement", "LoadOptions", "load_tensors", "device_of", "plan_placements", "scales_name"]
