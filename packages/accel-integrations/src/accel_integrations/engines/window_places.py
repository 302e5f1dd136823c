"""The places in which torch accumulates the gradients of one parameter within an accumulation window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from accel_integrations.engines.unsharded_gradients import dtype_of, keepers_of, put_gradient
from accel_integrations.prepared.parameters import plain_name
from accel_ops.modules import to_local


class Place(Protocol):
    """Where the gradient of one parameter, or a part of it, accumulates on this rank."""

    @property
    def shape(self) -> torch.Size:
        """The shape of what is kept here."""
        ...

    def get(self) -> torch.Tensor | None:
        """What has accumulated, a plain tensor that is not copied; None if nothing has."""
        ...

    def put(self, gradient: torch.Tensor | None) -> None:
        """Replace it by a tensor of `shape`, moved to the right device and cast to the dtype of gradients; None drops it."""
        ...


@dataclass(frozen=True)
class OfParameter:
    """`.grad` of a parameter; the shard of this rank if the parameter is a DTensor.

    Attributes:
        parameter: The parameter.
    """

    parameter: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter, or of its shard."""
        return to_local(self.parameter).shape

    def get(self) -> torch.Tensor | None:
        """What is in `.grad`, reduced first where that is due over the ranks of a DTensor."""
        gradient: Any = self.parameter.grad
        if gradient is None or to_local(gradient) is gradient:
            return gradient
        return to_local(gradient.redistribute(placements=self.parameter.placements))  # type: ignore[attr-defined]

    def put(self, gradient: torch.Tensor | None) -> None:
        """Put it into `.grad`."""
        parameter = self.parameter
        if gradient is not None:
            gradient = _distributed(gradient.to(parameter.device, parameter.dtype), getattr(parameter, "_spec", None))
        parameter.grad = gradient


@dataclass(frozen=True)
class OfUnsharded:
    """The unsharded gradient that `fully_shard` keeps.

    It is in `.grad` of the unsharded parameter where it is reduced in the dtype it is computed in, else in
    `unsharded_accumulated_grad`, which torch before 2.15 adds to in any case (`accel_integrations.engines.unsharded_gradients`).

    Attributes:
        keeper: torch's `FSDPParam`.
    """

    keeper: Any

    @property
    def is_part(self) -> bool:
        """Whether tensor parallelism shards what `fully_shard` unshards."""
        return bool(self.keeper.is_dtensor)

    @property
    def shape(self) -> torch.Size:
        """The shape of the unsharded parameter, or of its tensor-parallel shard."""
        shape: torch.Size = self.keeper._orig_size
        return shape

    def get(self) -> torch.Tensor | None:
        """What torch keeps, in whichever of the two places."""
        unsharded = getattr(self.keeper, "_unsharded_param", None)
        gradient = self.keeper.unsharded_accumulated_grad
        gradient = getattr(unsharded, "grad", None) if gradient is None else gradient
        if gradient is None or to_local(gradient) is gradient:
            return gradient
        return to_local(gradient.redistribute(placements=self._spec.placements))

    def put(self, gradient: torch.Tensor | None) -> None:
        """Put it where torch adds to it."""
        if gradient is not None:
            gradient = gradient.to(self.keeper.device, dtype_of(self.keeper))
            gradient = _distributed(gradient, self._spec if self.is_part else None)
        put_gradient(self.keeper, gradient)

    @property
    def _spec(self) -> Any:
        """The mesh and placements of the unsharded parameter; newer torch has another name for them."""
        return getattr(self.keeper, "_unsharded_dtensor_spec", None) or self.keeper._tp_spec


@dataclass(frozen=True)
class InFlat:
    """The view of one parameter in the unsharded gradient of a flat parameter.

    Attributes:
        handle: torch's `FlatParamHandle`.
        index: Which of its parameters.
    """

    handle: Any
    index: int

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        shape: torch.Size = self.handle.flat_param._shapes[self.index]
        return shape

    @property
    def _is_unsharded(self) -> bool:
        flat = self.handle.flat_param
        return flat.grad is not None and flat.grad.shape == flat._unpadded_unsharded_size

    def get(self) -> torch.Tensor | None:
        """A view, if the flat gradient is unsharded; None for a frozen parameter beside trainable ones."""
        originals = self.handle.flat_param._params
        if not self._is_unsharded or not (originals is None or originals[self.index].requires_grad):
            return None
        return self._view()

    def _view(self) -> torch.Tensor:
        view: torch.Tensor = list(self.handle._get_unflat_views(self.handle.flat_param.grad))[self.index]
        return view

    def put(self, gradient: torch.Tensor | None) -> None:
        """Copy it into the unsharded gradient, which begins as zeros; None drops those of all of its parameters."""
        handle = self.handle
        if gradient is None:
            _clear(handle)
            return
        if not self._is_unsharded:
            flat = handle.flat_param
            dtype = handle._fwd_bwd_param_dtype or flat.dtype
            flat.grad = torch.empty_like(flat)
            # through `data`, as torch does: a sharded parameter refuses a gradient of another size
            flat.grad.data = torch.zeros(flat._unpadded_unsharded_size, dtype=dtype, device=handle.device)
        self._view().copy_(gradient)
        if handle._use_orig_params:
            handle._use_unsharded_grad_views()


@dataclass(frozen=True)
class OfShard:
    """This rank's shard of the reduced gradient of a flat parameter.

    Attributes:
        handle: torch's `FlatParamHandle`.
    """

    handle: Any

    @property
    def shape(self) -> torch.Size:
        """The shape of the shard, padded: the same on all ranks."""
        shape: torch.Size = self.handle.flat_param._local_shard.shape
        return shape

    def get(self) -> torch.Tensor | None:
        """The gradient, if it is sharded."""
        gradient: torch.Tensor | None = self.handle.flat_param.grad
        return gradient if gradient is not None and gradient.shape == self.shape else None

    def put(self, gradient: torch.Tensor | None) -> None:
        """Put it into `.grad` of the flat parameter."""
        handle = self.handle
        if gradient is None:
            _clear(handle)
            return
        handle.flat_param.grad = gradient.to(handle.flat_param.device, handle.flat_param.dtype)
        if handle._use_orig_params:
            handle._use_sharded_grad_views()


# ---- what torch keeps -----------------------------------------------------------------------------------------------


def unsharded_places(model: nn.Module) -> dict[int, OfUnsharded]:
    """What `fully_shard` keeps of each parameter, by the parameter's id in both of its forms.

    Args:
        model: A model, whether or not `fully_shard` was applied to its modules.
    """
    found = {}
    for module in model.modules():
        for keeper in keepers_of(module):
            place = OfUnsharded(keeper)
            found[id(keeper.sharded_param)] = place
            if hasattr(keeper, "_unsharded_param"):
                found[id(keeper._unsharded_param)] = place
    return found


def flat_handles(wrapped: nn.Module) -> Iterator[tuple[str, Any]]:
    """The handles of flat parameters in a model that FSDP version 1 has wrapped.

    Args:
        wrapped: The model, with its wrappers; it may be compiled.

    Yields:
        The prefix of its parameters' names in the model as it was built, as `"layers.0."`, and the handle.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in getattr(wrapped, "_orig_mod", wrapped).named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield plain_name(f"{name}." if name else ""), module._handle


def _clear(handle: Any) -> None:
    """Drop the gradient of a flat parameter, and of those in it."""
    flat = handle.flat_param
    for one in (flat, *(flat._params or ()), *(flat._shared_params or ())):
        one.grad = None


def _distributed(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor with this rank's part; the tensor itself where there is no spec."""
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)
