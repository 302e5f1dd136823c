"""Parameters that `prepare` renamed or replaced, and the optimizers that were made for the old ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_integrations.parallel.whole_state import cut_like

WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """The name of a parameter or module without what wrappers inside the model add."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


class ReplacedParameters:
    """Knows which parameter took whose place, by its name in the model.

    Old parameters are not kept alive: where no optimizer has them, their memory is free at once.
    """

    def __init__(self) -> None:
        self._successors: Any = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy has other parameters, none of which was replaced

    @contextmanager
    def recording(self, model: nn.Module, inner: Callable[[nn.Module], nn.Module] | None = None) -> Iterator[None]:
        """A block in which parameters of a model may be replaced.

        Args:
            model: The model, changed in place.
            inner: Finds, in what is changed, the model with the old names; the model itself when None.
        """
        before = {name: weakref.ref(one) for name, one in _named_parameters(model)}
        yield
        for name, new in _named_parameters(model if inner is None else inner(model)):
            old = before[name]() if name in before else None
            if old is not None and old is not new:
                self._successors[old] = new

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the new parameters in place of the old ones: groups, settings and state stay.

        Args:
            optimizer: Any; nothing happens to one that has no replaced parameter.
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
                        optimizer.state[new] = {key: cut_like(value, new) for key, value in state.items()}
        if changed:
            for group in optimizer.param_groups:
                _step_one_by_one(group)


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All names of all parameters, as they were before anything was wrapped around parts of the model."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter


def _step_one_by_one(group: dict[str, Any]) -> None:
    """Keep torch from treating distributed and other parameters as one list, unless the user has decided."""
    kinds = {getattr(one, "device_mesh", None) for one in group["params"]}
    if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = False
