"""Moving a module's weights and inputs to the device on which it runs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from accel_bigmodel.hooks.hook import ModelHook
from accel_bigmodel.hooks.offloaded import OffloadedTensor
from accel_bigmodel.offload.loader import find_source
from accel_bigmodel.sizes import get_non_persistent_buffers, named_module_tensors
from accel_bigmodel.tensors import TiedTensors, set_module_tensor_to_device, tied_copy_on
from accel_ops.placement import find_device, send_to_device
from accel_state.public_names import known_as

_ties: Any = WeakIdKeyDictionary()  # of the tensors that modules had before


class Tie:
    """The tensors that took the place of one. Hooks of all modules that had it share this object, and so do copies of them."""

    def __init__(self) -> None:
        self._standing: dict[Any, Callable[[], torch.Tensor | None]] = {}
        self._restored: Callable[[], torch.Tensor | None] = _nothing

    @staticmethod
    def of(original: torch.Tensor) -> Tie:
        """The tie of a tensor that is about to be replaced."""
        tie: Tie = _ties.setdefault(original, Tie())
        return tie

    def standing_in(self, device: Any) -> torch.Tensor | None:
        """The tensor without a value that stands in another module that computes on this device."""
        return self._standing.get(device, _nothing)()

    def stands_in(self, device: Any, tensor: torch.Tensor) -> None:
        """Note the tensor without a value."""
        self._standing[device] = weakref.ref(tensor)

    @property
    def restored(self) -> torch.Tensor | None:
        """The tensor with its value that another module has for good."""
        return self._restored()

    @restored.setter
    def restored(self, tensor: torch.Tensor) -> None:
        self._restored = weakref.ref(tensor)

    def __reduce__(self) -> Any:
        return Tie, ()


def _nothing() -> None:
    """A weak reference to nothing."""


logger = logging.getLogger("accelerate.hooks")

Module = TypeVar("Module", bound=nn.Module)
META = torch.device("meta")


@dataclass(slots=True, eq=False)
class WeightSlot:
    """A parameter or buffer of a module that is filled for each forward pass and emptied after it."""

    name: str
    tensors: MutableMapping[str, Any]  # the module's dictionary of parameters or of buffers
    key: str
    empty: torch.Tensor  # the tensor on the meta device that stands there in between
    tie: Tie = field(default_factory=Tie)  # to weights of other modules that were the same tensor
    source: torch.Tensor | None = None  # the weight that was there last, and
    ready: torch.Tensor | None = None  # what was made of it without a copy

    @property
    def is_assigned(self) -> bool:
        """Whether a program has put a weight of its own there, as `load_state_dict(assign=True)` does, or none (parametrizations)."""
        present = self.tensors.get(self.key)
        return present is None or (present is not self.empty and not present.is_meta)

    def __reduce__(self) -> Any:
        # The `ready` of a copy shares its own weights.
        return WeightSlot, (self.name, self.tensors, self.key, self.empty, self.tie)


class Stream(Protocol):
    """What prefetches weights."""

    def fetch(self, hook: AlignDevicesHook) -> bool:
        """Fill the slots of a hook; False when the hook has to fill them itself."""

    def release(self, hook: AlignDevicesHook, output: Any) -> Any:
        """Record that the module has run; returns its output."""


@known_as("accelerate.hooks.AlignDevicesHook")
class AlignDevicesHook(ModelHook):
    """Moves inputs, and offloaded weights, to a module's device before its forward pass.

    Args:
        execution_device: The device; when None, nothing is moved.
        offload (`bool`): Whether weights are offloaded between forward passes.
        io_same_device (`bool`): Move outputs to the device of the inputs.
        weights_map: The weights by name; when None, those of the module, in CPU memory.
        offload_buffers (`bool`): Whether buffers are offloaded too.
        place_submodules (`bool`): Whether the hook moves the weights of all submodules too.
        skip_keys (`str` or list of `str`, *optional*): Keyword arguments that are not moved.
        tied_params_map: Copies of tied parameters, by `data_ptr()` and device.
    """

    execution_device: int | str | torch.device | None
    offload: bool
    io_same_device: bool
    weights_map: Any
    offload_buffers: bool
    place_submodules: bool
    skip_keys: str | list[str] | None
    tied_params_map: TiedTensors | None
    input_device: torch.device | None
    original_devices: dict[str, torch.device]
    param_original_devices: dict[str, torch.device]
    buffer_original_devices: dict[str, torch.device]
    tied_params_names: set[str]
    """Weights that are tied to those of other modules, by `tied_params_map`."""
    tied_pointers_to_remove: set[tuple[int, Any]]
    slots: Sequence[WeightSlot] | None = None
    """The parameters and buffers that are offloaded; None before `init_hook`."""
    assigned_slots: tuple[WeightSlot, ...] = ()
    """Those in whose place a program has put weights of its own."""
    is_filled: bool = False
    """Whether the slots are filled, as during a forward pass."""
    stream: Stream | None = None
    """The stream that prefetches the weights, if there is one."""

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device = None
        self.original_devices = {}
        self.param_original_devices = {}
        self.buffer_original_devices = {}
        self.tied_params_names = set()
        self.tied_pointers_to_remove = set()

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device!r}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The attributes; tied tensors by name, since the weights of a copy have other addresses."""
        return {**self.__dict__, "tied_params_map": dict(self._tied_by_name())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        tied_by_name = state.get("tied_params_map") or {}
        self.tied_params_map = {  # accelerate 1.15 pickles addresses, which are those of other tensors now
            self.weights_map[name].data_ptr(): tied for name, tied in tied_by_name.items() if isinstance(name, str)
        }

    def _tied_by_name(self) -> Iterator[tuple[str, MutableMapping[Any, torch.Tensor]]]:
        """The entries of `tied_params_map` for this hook's weights; those of other hooks are the same objects."""
        if not self.tied_params_map:
            return
        for slot in self.slots or ():
            source, home = find_source(self.weights_map, slot.name)
            if home is not None and source.data_ptr() in self.tied_params_map:
                yield slot.name, self.tied_params_map[source.data_ptr()]

    @override
    def init_hook(self, module: Module) -> Module:
        """Offload the weights, or move them to the device."""
        if self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            for name, _ in list(named_module_tensors(module, recurse=self.place_submodules)):
                self._place(module, name)
        return module

    def _offload(self, module: nn.Module) -> None:
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            kind = self.param_original_devices if isinstance(tensor, nn.Parameter) else self.buffer_original_devices
            kind[name] = tensor.device
        offloaded = self._offloaded(module)
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in offloaded.items()}
        self.slots = [self._empty_slot(module, name) for name in offloaded]
        if self.execution_device is not None:
            left = set(tensors) - set(offloaded)
            if self.offload_buffers:  # then only non-persistent buffers, which are in no checkpoint, are left
                left &= get_non_persistent_buffers(module, self.place_submodules, fqns=True)
            for name in sorted(left):
                self._place(module, name)

    def _empty_slot(self, module: nn.Module, name: str) -> WeightSlot:
        tensors, key = _place_of(module, name)
        tie = Tie.of(tensors[key])
        empty = tie.standing_in(self.execution_device)
        if isinstance(empty, OffloadedTensor):
            tensors[key] = empty
            empty.also_in(self, name)
        else:
            set_module_tensor_to_device(module, name, META)
            tensors[key] = empty = OffloadedTensor.standing_for(tensors[key], self, name)
            tie.stands_in(self.execution_device, empty)
        return WeightSlot(name, tensors, key, empty, tie)

    def _offloaded(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The weights that are offloaded between forward passes."""
        return dict(
            named_module_tensors(
                module, self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
            )
        )

    def _place(self, module: nn.Module, name: str) -> None:
        assert self.execution_device is not None
        tensors, key = _place_of(module, name)
        tie = Tie.of(tensors[key])
        set_module_tensor_to_device(module, name, self.execution_device, tied_params_map=self.tied_params_map)
        tie.restored = tensors[key]

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move weights and inputs to the device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.slots is None:
            # `init_hook` did not run: compressed-tensors skips it, and pickles of 1.15 have no slots.
            self.slots = [self._empty_slot(module, name) for name in self._offloaded(module)] if self.offload else ()
        self._set_aside_assigned(module)
        self.is_filled = True
        if self.stream is None or not self.stream.fetch(self):
            for slot in self.slots:
                self._fill(module, slot)
        if self.execution_device is None:
            return args, kwargs
        device = torch.device(self.execution_device)  # which tensors that are there already can be compared with
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def forget_weights(self) -> None:
        """Make nothing of what was made of weights before: their dtypes have changed (`module.half()`)."""
        self.slots = [WeightSlot(slot.name, slot.tensors, slot.key, slot.empty, slot.tie) for slot in self.slots or ()]

    def _set_aside_assigned(self, module: nn.Module) -> None:
        """Leave alone, on the module's device, what a program has put in the place of offloaded weights, as long as it is there."""
        if self.is_filled:  # by this hook, for a forward pass around this one or for one that failed
            return
        slots = (*(self.slots or ()), *self.assigned_slots)
        assigned = tuple(slot for slot in slots if slot.is_assigned)
        if assigned != self.assigned_slots:
            self.slots = [slot for slot in slots if not slot.is_assigned]  # a stream made for the old ones ends
            self.assigned_slots = assigned
        for slot in assigned:
            weight = slot.tensors.get(slot.key)
            if weight is None:
                self.original_devices.pop(slot.name, None)  # there is nothing to move back
            elif self.execution_device is not None and weight.device != torch.device(self.execution_device):
                set_module_tensor_to_device(module, slot.name, self.execution_device)

    def _fill(self, module: nn.Module, slot: WeightSlot) -> None:
        value = self.weights_map[slot.name]
        if value is slot.source:
            slot.tensors[slot.key] = slot.ready
            return
        statistics = _statistics(slot.name, value, self.weights_map)
        device = self.execution_device if self.execution_device is not None else value.device
        copies = self.tied_params_map.get(value.data_ptr()) if self.tied_params_map else None
        if copies is not None:
            self.tied_params_names.add(slot.name)
            if tied_copy_on(device, copies) is None:
                self.tied_pointers_to_remove.add((value.data_ptr(), device))
        set_module_tensor_to_device(
            module, slot.name, device, value=value, fp16_statistics=statistics, tied_params_map=self.tied_params_map
        )
        filled = slot.tensors[slot.key]
        if filled.device == value.device and filled.data_ptr() == value.data_ptr():
            slot.source, slot.ready = value, filled  # reused in the next forward pass

    @override
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Release the weights, and move outputs to the device of the inputs if asked to."""
        for slot in self.slots or ():
            slot.tensors[slot.key] = slot.empty
        self.is_filled = False
        for pointer, device in self.tied_pointers_to_remove:
            if self.tied_params_map is not None:
                self.tied_params_map[pointer].pop(device, None)
        self.tied_pointers_to_remove.clear()
        if self.stream is not None:
            output = self.stream.release(self, output)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    @override
    def detach_hook(self, module: Module) -> Module:
        """Move the weights back to their original devices; what was one tensor is one again.

        Weights that were on the meta device, since they were loaded to disk right away, become views of their files.
        """
        if not self.offload:
            return module
        self._set_aside_assigned(module)
        slots = {slot.name: slot for slot in self.slots or ()}
        for name, device in self.original_devices.items():
            if name in slots:
                self._restore(module, slots[name], device)
            elif device != META:
                set_module_tensor_to_device(module, name, device)
        return module

    def _restore(self, module: nn.Module, slot: WeightSlot, device: torch.device) -> None:
        restored = slot.tie.restored
        if restored is None and device == META and isinstance(slot.empty, OffloadedTensor):
            restored = _readable(slot.empty)
        if restored is not None:
            slot.tensors[slot.key] = restored
        else:
            value = None if device == META else self.weights_map.get(slot.name)
            set_module_tensor_to_device(module, slot.name, device, value=value)
        slot.tie.restored = slot.tensors[slot.key]


def _readable(weight: OffloadedTensor) -> torch.Tensor | None:
    """The weight, or None when its file is not there any more: hooks are removed all the same."""
    try:
        return weight.read("cpu")
    except (OSError, ValueError, KeyError) as error:
        logger.warning("An offloaded weight stays on the meta device, because it cannot be read: %s", error)
        return None


def _place_of(module: nn.Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    """The dictionary of a module that holds a parameter or buffer, and its key there."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    tensors: Any = owner._parameters if key in owner._parameters else owner._buffers
    return tensors, key


def _statistics(name: str, value: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The scales of an 8-bit weight of bitsandbytes."""
    scales = name.replace("weight", "SCB")
    return weights[scales] if value.dtype == torch.int8 and scales != name and scales in weights else None
