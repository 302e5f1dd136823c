"""Where engines keep the gradients of an open accumulation window, so that checkpoints can hold them.

A window is open between a micro-batch that is not a sync step and the next one that is. Most engines keep until its end
the gradients of each rank's own losses, unreduced and of the full shape: these are *whole*, and fit every engine. Where
parameters are split over ranks, or gradients reduced at each micro-batch, a rank keeps *parts*, which fit the same
arrangement of ranks only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain

from torch import nn

from accel_integrations.engines.unsharded_gradients import make_room
from accel_integrations.engines.window_places import (
    InFlat,
    OfParameter,
    OfShard,
    Place,
    flat_handles,
    unsharded_places,
)
from accel_integrations.prepared.parameters import plain_name
from accel_ops.modules import to_local

Places = dict[str, Place]


class WindowGradients(ABC):
    """Finds the gradients of an open window; `model` is always without its wrappers."""

    @abstractmethod
    def takes_whole(self, model: nn.Module) -> bool:
        """Whether whole gradients can be put into all of the model's parameters."""

    @abstractmethod
    def whole(self, model: nn.Module) -> Places:
        """Where whole gradients are, by name of the parameter."""

    @abstractmethod
    def parts(self, model: nn.Module) -> Places:
        """Where parts of gradients are, by names that are equal on the same rank of an equal arrangement."""

    def clear(self, model: nn.Module) -> None:
        """Drop what has accumulated."""
        for place in chain(self.whole(model).values(), self.parts(model).values()):
            place.put(None)

    def note_put(self, model: nn.Module) -> None:
        """Called after gradients were put into the model's places."""


class InGrad(WindowGradients):
    """Gradients accumulate in `.grad`; those of tensor-parallel parameters are parts."""

    def takes_whole(self, model: nn.Module) -> bool:
        """Unless parameters are DTensors."""
        return not self.parts(model)

    def whole(self, model: nn.Module) -> Places:
        """`.grad` of plain parameters."""
        return {name: OfParameter(one) for name, one in model.named_parameters() if to_local(one) is one}

    def parts(self, model: nn.Module) -> Places:
        """This rank's shard of `.grad` of parameters that are DTensors."""
        return {name: OfParameter(one) for name, one in model.named_parameters() if to_local(one) is not one}


class OfStages(WindowGradients):
    """Each rank of a pipeline has `.grad` of its own stages.

    Args:
        note_gradients: Told of each model into which gradients were put: they are to be reduced at the window's end.
    """

    def __init__(self, note_gradients: Callable[[nn.Module], None]) -> None:
        self._note_gradients = note_gradients

    def takes_whole(self, model: nn.Module) -> bool:
        """No: what a whole window holds of a parameter belongs to several pipelines."""
        return False

    def whole(self, model: nn.Module) -> Places:
        """None: no rank has the gradients of all parameters."""
        return {}

    def parts(self, model: nn.Module) -> Places:
        """`.grad` of the parameters of this rank's stages."""
        return {name: OfParameter(one) for name, one in model.named_parameters()}

    def note_put(self, model: nn.Module) -> None:
        """Tell the engine that there are gradients to reduce."""
        self._note_gradients(model)


class Unsharded(WindowGradients):
    """`fully_shard` keeps unsharded gradients beside its parameters while they are not reduce-scattered.

    What is reduce-scattered at each micro-batch (`sync_each_batch=True`) is in `.grad` of the sharded parameters.
    """

    def takes_whole(self, model: nn.Module) -> bool:
        """Unless tensor parallelism shards what `fully_shard` unshards, or parameters are DTensors without it."""
        sharded = unsharded_places(model)
        return all(
            not sharded[id(one)].is_part if id(one) in sharded else to_local(one) is one for one in model.parameters()
        )

    def whole(self, model: nn.Module) -> Places:
        """The unsharded gradients, and `.grad` of parameters that are not sharded."""
        sharded = unsharded_places(model)
        found: Places = {}
        for name, parameter in model.named_parameters():
            place = sharded.get(id(parameter))
            if place is not None and not place.is_part:
                found[name] = place
            elif place is None and to_local(parameter) is parameter:
                found[name] = OfParameter(parameter)
        return found

    def clear(self, model: nn.Module) -> None:
        """Drop what has accumulated, and make room for what is put."""
        make_room(model)
        super().clear(model)

    def parts(self, model: nn.Module) -> Places:
        """The shards of reduced gradients, and unsharded ones that tensor parallelism has split."""
        sharded = unsharded_places(model)
        found: Places = {}
        for name, parameter in model.named_parameters():
            place = sharded.get(id(parameter))
            if place is not None:
                found[name] = OfParameter(place.keeper.sharded_param)
                if place.is_part:
                    found[f"{name} (unsharded)"] = place
            elif to_local(parameter) is not parameter:
                found[name] = OfParameter(parameter)
        return found


class InFlatGrad(WindowGradients):
    """FSDP version 1: `.grad` of flat parameters, unsharded until it is reduce-scattered.

    Args:
        wrapped_of: The wrapped model of one without its wrappers.
    """

    def __init__(self, wrapped_of: Callable[[nn.Module], nn.Module]) -> None:
        self._wrapped_of = wrapped_of

    def takes_whole(self, model: nn.Module) -> bool:
        """Yes: the flat gradient is unsharded until it is reduced."""
        return True

    def whole(self, model: nn.Module) -> Places:
        """Views of the unsharded flat gradients, and `.grad` of parameters that are not in a flat one."""
        found: Places = {}
        flattened = set()
        for prefix, handle in flat_handles(self._wrapped_of(model)):
            flat = handle.flat_param
            flattened |= {id(flat), *map(id, flat._params or ()), *map(id, flat._shared_params or ())}
            for index, name in enumerate(flat._fqns):
                found[prefix + plain_name(name)] = InFlat(handle, index)
        for name, parameter in model.named_parameters():
            if id(parameter) not in flattened:
                found[plain_name(name)] = OfParameter(parameter)
        return found

    def parts(self, model: nn.Module) -> Places:
        """The shards of reduced flat gradients."""
        handles = flat_handles(self._wrapped_of(model))
        return {f"{prefix}_flat_param": OfShard(handle) for prefix, handle in handles if handle.uses_sharded_strategy}
