"""Modules of a model that is split into stages: wrapped forwards of those on this rank, placeholders for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class StageForward:
    """Replaces the forward of a module that this rank holds.

    Args:
        name: The name of the module.
        forward: Its own forward.
        call: Handles the call, `StagedModel._call`.
    """

    def __init__(self, name: str, forward: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._name = name
        self._forward = forward
        self._call = call
        self.__wrapped__ = forward  # for code that reads the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What this module returns in the stage that runs."""
        return self._call(self._name, self._forward, args, kwargs)


class PlaceholderModule(nn.Module):
    """Placeholder for a module that another rank holds. It has no parameters, and computes nothing.

    Attributes of the module it stands for can still be read.
    """

    def __init__(self, name: str, original: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self._set("_name", name)
        self._set("_original", original)
        self._set("_call", call)

    def _set(self, name: str, value: Any) -> None:
        self.__dict__[name] = value  # the original must not become a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What this module returns in the stage that runs."""
        return self._call(self._name, None, args, kwargs)

    def train(self, mode: bool = True) -> PlaceholderModule:
        """Set the training mode, also of the original module."""
        self._original.train(mode)
        super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in ("_original", "_call", "_name"):
            raise AttributeError(name)  # not set yet
        return getattr(self._original, name)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load nothing, but check names and shapes, so that all ranks reject the same checkpoints."""
        tensors = self._original.state_dict(prefix=prefix)
        for name, tensor in tensors.items():
            if name not in state_dict:
                if strict:
                    missing_keys.append(name)
            elif state_dict[name].shape != tensor.shape:
                error_msgs.append(
                    f"size mismatch for {name}: the checkpoint has {tuple(state_dict[name].shape)}, the model "
                    f"{tuple(tensor.shape)}."
                )
        if strict:
            unexpected_keys.extend(name for name in state_dict if name.startswith(prefix) and name not in tensors)

    def __repr__(self) -> str:
        return f"PlaceholderModule({type(self._original).__name__})"


def reallocate(module: nn.Module, device: torch.device | str) -> None:
    """Give a module parameters and buffers without content, leaving its own ones, which others may share, as they are.

    Args:
        module: The module.
        device: Where; on the meta device they take no memory.
    """
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=device, requires_grad=False)
                submodule._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = torch.empty_like(buffer, device=device)
