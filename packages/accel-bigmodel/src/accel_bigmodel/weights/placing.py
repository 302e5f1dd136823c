"""Planning from which tensor of a checkpoint, and on which device, each tensor of a model is loaded; and loading it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Self

import torch
from torch import nn

from accel_bigmodel.device_map.modules import holder_of
from accel_bigmodel.tensors import is_quantised, set_module_tensor_to_device
from accel_bigmodel.weights.compare import SCALES, expected_tensors, find_sources
from accel_bigmodel.weights.contents import ByteSource, CheckpointContents
from accel_bigmodel.weights.progress import ByteProgress
from accel_state.devices import resolve_device

NUM_GPU_READERS = 12  # a PCIe 5 bus takes 56 GB/s, and one core reads about a tenth of that from the page cache
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 1 << 20, 1 << 24


@dataclass(slots=True)
class _Buffer:
    """Pinned memory of one thread, and the event at the end of the last copy from it."""

    memory: torch.Tensor
    sent: Any = None


class DeviceCopier:
    """Copies tensors to CUDA devices. Each thread reads slices into a pinned buffer; while it is copied, others read.

    Args:
        readers: The threads.
        num_bytes: How much will be copied in all. No more memory is pinned than that, since pinning takes as long as copying
            several times.
    """

    def __init__(self, readers: ThreadPoolExecutor, num_bytes: int) -> None:
        self._readers = readers
        self._slice_bytes = max(MIN_SLICE_BYTES, min(MAX_SLICE_BYTES, num_bytes // NUM_GPU_READERS))
        self._here = threading.local()
        self._streams: dict[torch.device, Any] = {}

    def start(self, source: ByteSource, target: torch.Tensor) -> Sequence[Future[Any]]:
        """Start copying a tensor.

        Args:
            source: Its bytes.
            target: A contiguous tensor on a CUDA device.

        Returns:
            Futures of CUDA events; the target has its values when they have completed.
        """
        stream = self._stream(target.device)
        stream.wait_stream(torch.cuda.current_stream(target.device))  # on which this memory was used before
        flat = target.detach().reshape(-1).view(torch.uint8)
        slices = range(0, flat.numel(), self._slice_bytes)
        return [
            self._readers.submit(self._copy, source, begin, flat[begin : begin + self._slice_bytes], stream)
            for begin in slices
        ]

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _copy(self, source: ByteSource, begin: int, target: torch.Tensor, stream: Any) -> Any:
        """In a thread: copy the bytes from `begin` on; returns an event."""
        # the device is set for pinned memory, too: the thread's own device is GPU 0
        with torch.cuda.device(target.device), torch.cuda.stream(stream):
            buffer = self._own_buffer()
            if buffer.sent is not None:
                buffer.sent.synchronize()
            filled = buffer.memory[: target.numel()]
            source.read_into(filled, begin)
            target.copy_(filled, non_blocking=True)
            buffer.sent = stream.record_event()
            return buffer.sent

    def _own_buffer(self) -> _Buffer:
        if not hasattr(self._here, "buffer"):
            self._here.buffer = _Buffer(torch.empty(self._slice_bytes, dtype=torch.uint8, pin_memory=True))
        buffer: _Buffer = self._here.buffer
        return buffer

    def synchronize(self) -> None:
        """Wait until all copies that were started have ended; no thread may be starting more."""
        for stream in self._streams.values():
            stream.synchronize()


CPU, META = torch.device("cpu"), torch.device("meta")
DISK = "disk"
NUM_READERS = min(8, os.cpu_count() or 1)
SMALL_BYTES = 1 << 24  # not worth starting threads for
MAX_RAW_BYTES = 1 << 28  # of tensors on accelerators that wait there for their conversion

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
    if is_quantised(old):
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
    return device_map.get(holder_of(name, device_map), default)


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

    total = sum(placement.num_bytes for placement in copied)
    with ByteProgress(total, "Loading weights", show_progress) as progress, _Readers(contents, tensors) as readers:
        read_all = readers.read_all if total >= SMALL_BYTES and NUM_READERS > 1 else readers.read_one_by_one
        for placement, value in zip(copied, read_all(copied), strict=True):
            if not placement.in_place:
                _assign(modules, placement, value, contents)
            progress.advance(placement.num_bytes)


class _Readers:
    """Threads that read tensors of a checkpoint to their devices.

    Args:
        contents: The checkpoint.
        tensors: Those of the model, which get values in place.
    """

    def __init__(self, contents: CheckpointContents, tensors: Mapping[str, torch.Tensor]) -> None:
        self._contents = contents
        self._tensors = tensors
        self._threads: ThreadPoolExecutor | None = None
        self._copier: DeviceCopier | None = None
        self._raw_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Start nothing more, and wait for what was started: after an error, memory that is copied to is about to be freed."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._copier is not None:
            self._copier.synchronize()

    def read_one_by_one(self, placements: Sequence[Placement]) -> Iterator[torch.Tensor]:
        """The values of a small checkpoint, without threads."""
        return map(self._read, placements)

    def read_all(self, placements: Sequence[Placement]) -> Iterator[torch.Tensor]:
        """The values in the order of the placements, while threads read those that follow."""
        on_gpus = any(placement.device.type == "cuda" for placement in placements)
        num_threads = min(NUM_GPU_READERS, os.cpu_count() or 1) if on_gpus else NUM_READERS
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
        self._copier = DeviceCopier(self._threads, sum(placement.num_bytes for placement in placements))
        started: deque[Callable[[], torch.Tensor]] = deque()
        for placement in placements:
            started.append(self._start(placement))
            while self._raw_bytes > MAX_RAW_BYTES and len(started) > 1:
                yield started.popleft()()
        while started:
            yield started.popleft()()

    def _read(self, placement: Placement) -> torch.Tensor:
        """Read a tensor completely."""
        self._contents.read_ahead(placement.source)
        value = self._contents.tensor(placement.source).detach()
        with torch.no_grad():
            if placement.in_place:
                tensor = self._tensors[placement.name].copy_(value)
            else:
                tensor = value.to(placement.device, placement.dtype, copy=True)
        self._contents.forget(placement.source)
        return tensor

    def _start(self, placement: Placement) -> Callable[[], torch.Tensor]:
        """Have threads read a tensor; returns what waits for it."""
        assert self._threads is not None
        assert self._copier is not None
        source = self._contents.byte_source(placement.source) if placement.device.type == "cuda" else None
        if source is None:
            return self._threads.submit(self._read, placement).result
        stored = self._contents.dtype_and_shape(placement.source)
        assert stored is not None  # or there was no placement
        tensor = self._tensors[placement.name]
        if placement.in_place and tensor.dtype == stored[0] and tensor.is_contiguous() and _is_plain(tensor):
            return partial(_arrived, tensor, self._copier.start(source, tensor))
        target = torch.empty(placement.shape, dtype=stored[0], device=placement.device)
        copies = self._copier.start(source, target)
        if placement.dtype == stored[0] and not placement.in_place:
            return partial(_arrived, target, copies)
        self._raw_bytes += target.nbytes
        return partial(self._converted, placement, target, copies)

    def _converted(self, placement: Placement, raw: torch.Tensor, copies: Sequence[Future[Any]]) -> torch.Tensor:
        """A tensor in its dtype, or written to the model's own; computed on its device behind the copies."""
        for copy in copies:
            torch.cuda.current_stream(raw.device).wait_event(copy.result())
        self._raw_bytes -= raw.nbytes
        with torch.no_grad():
            return self._tensors[placement.name].copy_(raw) if placement.in_place else raw.to(placement.dtype)


def _arrived(target: torch.Tensor, copies: Sequence[Future[Any]]) -> torch.Tensor:
    """The target once its last bytes have been read; they may still be copied to it."""
    for copy in copies:
        copy.result()
    return target


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)


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
        parameter = nn.Parameter(value, requires_grad=old.requires_grad and differentiable)
        parameter.__dict__.update(old.__dict__)
        owner._parameters[leaf] = parameter
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
