"""Parameters that `prepare` renamed or replaced, and rebinding optimizers that were made for the old ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_integrations.parallel.full_state import distribute_like

WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """The name of a parameter or module without the prefixes of wrappers inside the model."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


class ReplacedParameters:
    """Maps replaced parameters to the new ones of the same name in the model.

    Old parameters are not kept alive: their memory is freed once no optimizer has them.
    """

    def __init__(self) -> None:
        self._successors: Any = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), ()  # a pickled copy has other parameters, none of them replaced

    @contextmanager
    def recording(self, model: nn.Module, inner: Callable[[nn.Module], nn.Module] | None = None) -> Iterator[None]:
        """A block in which parameters of a model may be replaced.

        Args:
            model: The model, changed in place.
            inner: Finds, in what is changed, the model with the old names; the model itself when None.
        """
        before = {name: weakref.ref(weight) for name, weight in _named_parameters(model)}
        yield
        for name, new in _named_parameters(model if inner is None else inner(model)):
            old = before[name]() if name in before else None
            if old is not None and old is not new:
                self._successors[old] = new

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace old parameters of an optimizer by the new ones; groups, options and state are kept.

        Args:
            optimizer: Any optimizer; one without replaced parameters is not changed.
        """
        if not self._successors:
            return
        changed = False
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                new = self._successors.get(old)
                if new is not None:
                    changed = True
                    group["params"][index] = new
                    state = optimizer.state.pop(old, None)
                    if state is not None:
                        optimizer.state[new] = {key: distribute_like(value, new) for key, value in state.items()}
        if changed:
            for group in optimizer.param_groups:
                _step_one_by_one(group)


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All names of all parameters, without the prefixes of wrappers."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter


def _step_one_by_one(group: dict[str, Any]) -> None:
    """Set `foreach=False` where DTensors and plain tensors are in one group, unless the user has set it."""
    kinds = {getattr(weight, "device_mesh", None) for weight in group["params"]}
    if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = False
