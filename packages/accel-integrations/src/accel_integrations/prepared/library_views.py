"""What libraries that save a sharded model see of it: names and prompt embeddings as in one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from accel_bigmodel.model_methods import ModelMethod
from accel_integrations.prepared.parameters import plain_name


class PlainModuleNames(ModelMethod):
    """`named_modules` of a model inside FSDP version 1, without the names of the wrappers.

    peft looks for the names of modules in the full state dict, where torch leaves the wrappers' names out.
    """

    def __call__(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules by name; by torch's names where a wrapper around this model asks, which passes its own `memo`."""
        modules = type(self.model).named_modules(self.model, memo, prefix, remove_duplicate)
        if memo is not None:
            return modules
        return ((plain_name(name), module) for name, module in modules)


class PromptEmbeddings(ModelMethod):
    """peft's `get_prompt_embedding_to_save` of a model whose prompt encoders are sharded: by the weights of a full state dict.

    Args:
        model: The model of peft.
        state: The full state dict.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        super().__init__(model)
        self._state = {name: value for name, value in state.items() if name.startswith("prompt_encoder.")}

    def __call__(self, adapter_name: str) -> torch.Tensor:
        """The embeddings of an adapter's prompt, of shape `(virtual tokens, width)`; no other rank has to call this.

        Returns:
            A tensor on the meta device on a rank that has no values of the state dict.
        """
        model: Any = self.model
        encoders = model.prompt_encoder
        sharded = encoders[adapter_name]
        encoders[adapter_name] = _unsharded(sharded, self._state, f"prompt_encoder.{adapter_name}.")
        try:
            embeddings: torch.Tensor = type(model).get_prompt_embedding_to_save(model, adapter_name)
        finally:
            encoders[adapter_name] = sharded
        return embeddings.to("meta") if any(value.is_meta for value in self._state.values()) else embeddings

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model, self._state)


def as_libraries_see_it(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The full state dict of a sharded model for programs: on ranks without values it has names for peft alone.

    Args:
        state: From `Engine.full_state_dict`; a model of peft saves prompt embeddings out of it, too.
        model: The model without wrappers.
    """
    if not hasattr(model, "peft_config"):
        return {} if any(getattr(value, "is_meta", False) for value in state.values()) and dist.get_rank() else state
    if hasattr(model, "prompt_encoder"):
        model.get_prompt_embedding_to_save = PromptEmbeddings(model, state)  # type: ignore[assignment]
    return state


def _unsharded(module: nn.Module, state: Mapping[str, Any], prefix: str) -> nn.Module:
    """A copy of a module without hooks, with parameters from a full state dict."""
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__ |= module.__dict__
    copied.__dict__ |= {name: OrderedDict() for name in module.__dict__ if name.endswith("_hooks")}
    copied.__dict__["_parameters"] = {
        name: None if parameter is None else nn.Parameter(_on_cpu(state[prefix + name]), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    copied.__dict__["_modules"] = {
        name: None if child is None else _unsharded(child, state, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return copied


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """The tensor, or zeros for one on the meta device."""
    return torch.zeros_like(value, device="cpu") if value.is_meta else value
