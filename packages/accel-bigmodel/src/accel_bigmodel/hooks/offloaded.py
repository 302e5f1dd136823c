"""What stands in a module for an offloaded weight between forward passes: a meta tensor that is the weight when it is used.

Some programs read weights outside of the forward pass of their module: a product with `lm_head.weight`, a transposed embedding in a
loss, `out_proj.weight` in attention. On an ordinary meta tensor these raise an error or, mixed with tensors in CPU memory, return
memory that was never written. Torch hands each operation on a tensor of a subclass to the subclass first (`__torch_function__`),
which reads the weight then. Modules compute with ordinary tensors: their hooks put these in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from accel_bigmodel.offload.loader import find_source
from accel_ops.nested import recursively_apply
from accel_state.devices import resolve_device
from accel_state.weak import Weak

VALUES = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))  # all other attributes describe the meta tensor
DESCRIPTIONS = frozenset((
    "__hash__", "__len__", "data_ptr", "dim", "dim_order", "element_size", "get_device", "has_names", "is_complex", "is_conj",
    "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed",
    "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "result_type",
    "retain_grad", "size", "storage_offset", "stride", "untyped_storage",
))  # fmt: skip
CASTS = frozenset(("bfloat16", "bool", "char", "double", "float", "half", "int", "long", "short", "to"))
IN_PLACE_OPERATORS = frozenset((
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__",
    "__ixor__", "__ilshift__", "__irshift__",
))  # fmt: skip
META = torch.device("meta")
DEVICES = (str, int, torch.device, torch.Tensor)


class OffloadingHook(Protocol):
    """The hook of a module whose weights are offloaded."""

    weights_map: Any
    execution_device: Any
    tied_params_map: Any

    def forget_weights(self) -> None:
        """Make nothing of what was made of weights before."""


class OffloadedDevice(str):
    """The device of an offloaded weight: it reads as the meta device, and what moves to it goes where the weight computes.

    Programs ask a weight for its device to see that it is offloaded (`weight.device == torch.device("meta")`), and to put other tensors
    beside it (`x.to(weight.device)`, the new weights of an adapter), where a meta tensor would have lost its values. Torch takes the
    name of a device wherever it takes a device; this is such a name, with the attributes of a device.
    """

    type = META.type
    index = META.index  # type: ignore[assignment]  # a device's, not the method of a string

    def __eq__(self, other: object) -> bool:
        if type(other) is str:  # `torch.load(..., map_location=device)` looks for its name
            return super().__eq__(other)
        return isinstance(other, OffloadedDevice) or other == META

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(META)

    def __str__(self) -> str:
        return str(META)

    def __repr__(self) -> str:
        return repr(META)

    def __reduce__(self) -> Any:
        return torch.device, (META.type,)


class OffloadedTensor(torch.Tensor):
    """A parameter or buffer on the meta device whose value is offloaded.

    Shape, dtype, device and the like are those of the meta tensor, so that programs see that the weight is offloaded. Any other
    operation reads the weight, to the device on which its module computes. `detach`, `data` and casts are not read before they are
    used in turn, so that `state_dict()` and `module.half()` read nothing. What is written goes to the weight in CPU memory; a
    weight on disk cannot be written to.
    """

    _source: _WeightSource
    _through: tuple[torch.dtype, ...] = ()  # the dtypes to which it was cast before, one after the other

    @staticmethod
    def standing_for(empty: torch.Tensor, hook: OffloadingHook, name: str) -> torch.Tensor:
        """The tensor for an empty slot of a hook.

        Args:
            empty: What stands there, on the meta device.
            hook: The hook.
            name: The name of the weight in the hook's `weights_map`.

        Returns:
            `empty` itself if it is a tensor of another library, which has methods of its own.
        """
        if type(empty) not in (torch.Tensor, nn.Parameter):
            return empty
        return _make(empty, _WeightSource(hook, name), empty.__dict__)

    def also_in(self, hook: OffloadingHook, name: str) -> None:
        """Stand in another module, too, which had the same weight."""
        self._source.places.append((Weak(hook), name))

    @property
    def _has_value(self) -> bool:
        """Whether another library has made a tensor with memory of this class, to keep what it knows of a weight."""
        with torch._C.DisableTorchFunctionSubclass():
            return not self.is_meta

    def ordinary(self) -> torch.Tensor:
        """An ordinary meta tensor or parameter, without a value."""
        empty = _ordinary(self)
        if not isinstance(self, nn.Parameter):
            return empty
        parameter = nn.Parameter(empty, requires_grad=self.requires_grad)
        parameter.__dict__.update(attributes_of(self))
        return parameter

    def read(self, device: Any = None) -> torch.Tensor:
        """The weight; a parameter is a new one, whose gradient nobody sees, as in a forward pass.

        Args:
            device: Where to; that on which its module computes when None.

        Raises:
            RuntimeError: It is not to be had any more.
        """
        if self._has_value:
            return _ordinary(self)
        value = self._source.read((*self._through, self.dtype), device)
        return nn.Parameter(value, requires_grad=self.requires_grad) if isinstance(self, nn.Parameter) else value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Describe the tensor, put the reading off, write to the weight, or read it."""
        kwargs = kwargs or {}
        name, is_attribute = _name_of(func)
        first: Any = args[0] if args else kwargs.get("tensor")  # as functions of torch.nn.init call theirs
        target = kwargs.get("out", first)
        if isinstance(first, OffloadedTensor) and first._has_value:
            others = partial(recursively_apply, lambda tensor: tensor if tensor is first else _read(tensor))
            return _as_ordinary(func, others(args), others(dict(kwargs)))
        if name == "device" and isinstance(first, OffloadedTensor):
            return first._source.device_to_move_to()
        if name in DESCRIPTIONS or (is_attribute and name not in VALUES and isinstance(first, OffloadedTensor)):
            result = _as_ordinary(func, args, kwargs)
            if name in ("", "requires_grad_"):
                first._source.changed()
            return result
        if isinstance(first, OffloadedTensor):
            if name in ("detach", "data"):
                return _make(_ordinary(first), first._source, through=first._through)
            if name in CASTS and not _names_device(args[1:], kwargs):
                return _make(
                    _ordinary(_as_ordinary(func, args, kwargs)), first._source, through=(*first._through, first.dtype)
                )
        writes = "out" in kwargs or name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(target, OffloadedTensor):
            return _write(func, target, args, kwargs)
        return func(*recursively_apply(_read, args), **recursively_apply(_read, dict(kwargs)))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # torch's stub calls it Any
        return repr(self.read())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Within a copied model, the weight of the copy; otherwise a copy of the weight itself."""
        from copy import deepcopy

        if not memo or not isinstance(self, nn.Parameter):
            value = self.read().detach().clone()
            return nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
        copied: Any = _make(_ordinary(self), None, attributes_of(self), self)
        memo[id(self)] = copied
        copied._source = deepcopy(self._source, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A parameter is pickled with its model and its hook; what came from a state dict is pickled as the weight."""
        if not isinstance(self, nn.Parameter):
            return self.read("cpu").detach().clone().__reduce_ex__(protocol)
        return _rebuild, (_ordinary(self), self.requires_grad), dict(self.__dict__)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class _WeightSource:
    """Where a weight is: names in the weights of hooks, which refer to this and are not kept alive by it."""

    def __init__(self, hook: OffloadingHook, name: str) -> None:
        self.places = [(Weak(hook), name)]

    def find(self) -> tuple[OffloadingHook, str]:
        """A hook that is there, and the name that its weights have for this one."""
        for reference, name in self.places:
            hook = reference.find()
            if hook is not None:
                return hook, name
        raise RuntimeError(
            f"The offloaded weight {self.places[0][1]!r} cannot be read any more: its model was deleted, or its hooks were removed. "
            "Take the tensor from the model again, or copy it before."
        )

    @property
    def device(self) -> torch.device:
        """Where the module of the weight computes."""
        hook, name = self.find()
        return (
            hook.weights_map[name].device if hook.execution_device is None else resolve_device(hook.execution_device)
        )

    def device_to_move_to(self) -> Any:
        """The device as programs see it; the meta device once the weight cannot be read any more."""
        try:
            return OffloadedDevice(self.device)
        except RuntimeError:
            return META

    def changed(self) -> None:
        """An attribute of the tensor was set, perhaps its dtype."""
        for reference, _ in self.places:
            hook = reference.find()
            if hook is not None:
                hook.forget_weights()

    def read(self, dtypes: tuple[torch.dtype, ...], device: Any) -> torch.Tensor:
        hook, name = self.find()
        value = hook.weights_map[name]
        if device is None:
            device = self.device
        with torch.no_grad():
            for dtype in dtypes:
                value = value.detach().to(device=device, dtype=dtype)
        return value

    def stored(self) -> torch.Tensor:
        """The weight in CPU memory, to be written to."""
        hook, name = self.find()
        weight, home = find_source(hook.weights_map, name)
        full_name = f"{getattr(hook.weights_map, 'prefix', '')}{name}"
        if home is None:
            raise RuntimeError(
                f"The weight {full_name!r} is offloaded to disk, where it cannot be written to: load its module into CPU memory or to "
                "a device before you change it."
            )
        if (hook.tied_params_map or {}).get(weight.data_ptr()):
            raise RuntimeError(
                f"The offloaded weight {full_name!r} is tied to one on a device and cannot be written to: change that one, or remove "
                "the hooks first (remove_hook_from_submodules)."
            )
        return weight.detach()


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What a program or a library has put on a tensor, without what makes it an `OffloadedTensor`."""
    return {name: value for name, value in tensor.__dict__.items() if name not in ("_source", "_through", "_is_param")}


def _make(
    empty: torch.Tensor,
    source: _WeightSource | None,
    attributes: Mapping[str, Any] = {},
    like: Any = None,
    through: tuple[torch.dtype, ...] = (),
) -> torch.Tensor:
    """A tensor on the meta device for a weight; a parameter, if `empty` or `like` is one."""
    kind = empty if like is None else like
    is_parameter = isinstance(kind, nn.Parameter)
    tensor: Any = torch.Tensor._make_subclass(OffloadedTensor, empty.detach(), is_parameter and kind.requires_grad)
    tensor.__dict__.update(attributes)
    tensor._source = source
    if through:
        tensor._through = through
    if is_parameter:
        tensor._is_param = True  # torch takes tensors of other classes with this flag for parameters
    return tensor


def _rebuild(empty: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return torch.Tensor._make_subclass(OffloadedTensor, empty, requires_grad)


def _as_ordinary(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The meta tensor as an ordinary one."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor._make_subclass(torch.Tensor, tensor.detach())


def _name_of(func: Any) -> tuple[str, bool]:
    """The name of a function and False, or the attribute that it gets and True; setting one is an attribute without a name."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "T"), True  # one that Python computes is a value
    return ("", True) if name in ("__set__", "__delete__") else (name, False)


def _names_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a cast may also move: `to("cuda")`, `to(other)`, `type("torch.cuda.FloatTensor")`."""
    return any(isinstance(value, DEVICES) for value in args) or kwargs.get("device") is not None or "other" in kwargs


def _write(func: Callable[..., Any], target: OffloadedTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that writes in place, on the weight in CPU memory."""
    stored = target._source.stored()

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        return stored if tensor is target else _read(tensor, "cpu").to("cpu")

    with torch.no_grad():
        func(*recursively_apply(on_cpu, args), **recursively_apply(on_cpu, dict(kwargs)))
    return target


def _read(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor.read(device) if isinstance(tensor, OffloadedTensor) else tensor
