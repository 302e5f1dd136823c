"""Flat parameters, into which version 1 of FSDP joins those of a block, in optimizers made for the single ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_integrations.prepared.parameters import plain_name


class FlatParameters:
    """Knows which flat parameter each parameter has become part of."""

    def __init__(self) -> None:
        self._flat_of: Any = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy has other parameters, which are part of nothing yet

    @staticmethod
    def remember(model: nn.Module) -> dict[str, weakref.ref[nn.Parameter]]:
        """The parameters of a model by name, to be handed to `note`; their memory is not held on to."""
        return {name: weakref.ref(one) for name, one in model.named_parameters(remove_duplicate=False)}

    def note(self, before: dict[str, weakref.ref[nn.Parameter]], wrapped: nn.Module) -> None:
        """Note what has become of parameters.

        Args:
            before: From `remember`.
            wrapped: What became of the model.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        for name, module in wrapped.named_modules():
            if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
                continue
            prefix = plain_name(f"{name}." if name else "")
            flat: Any = module._handle.flat_param
            for inner in flat._fqns:
                reference = before.get(prefix + plain_name(inner))
                if reference is not None and (old := reference()) is not None:
                    self._flat_of[old] = flat

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the flat parameters in place of those that became part of them.

        Raises:
            ValueError: When parameters of different groups are in one flat parameter, or have state already.
        """
        if not any(one in self._flat_of for group in optimizer.param_groups for one in group["params"]):
            return
        owners: dict[int, int] = {}
        chosen = []
        for number, group in enumerate(optimizer.param_groups):
            new = {id(one): one for one in (self._flat_of.get(old, old) for old in group["params"])}
            chosen.append(list(new.values()))
            for flat in new:
                if owners.setdefault(flat, number) != number:
                    raise ValueError(
                        f"Parameters of groups {owners[flat]} and {number} of {type(optimizer).__name__} are joined into "
                        "one flat parameter, which can have the settings of one group only: pass "
                        "FullyShardedDataParallelPlugin(use_orig_params=True), or fsdp_version=2."
                    )
        if optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} has state for parameters that were joined into flat ones: pass "
                "FullyShardedDataParallelPlugin(use_orig_params=True), or make it after preparing the model."
            )
        for group, parameters in zip(optimizer.param_groups, chosen, strict=True):
            group["params"] = parameters
