"""One process: plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.engines.engine import Engine
from accel_integrations.engines.placing import move_model
from accel_state.warning import warn_user


@final
class SingleEngine(Engine):
    """Trains in one process: there is nobody to synchronize with."""

    name = "single"
    accumulates_in_grad = True

    @override
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        return move_model(model, self.context.state.device) if device_placement else model

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """No context is needed: there are no other ranks."""
        return nullcontext()

    @override
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """No context is needed, as for `no_sync`."""
        return nullcontext()

    @override
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Without effect, with a warning."""
        warn_user(
            f"join_uneven_inputs() has no effect with the {self.name!r} engine. Remove it, or launch more than one process."
        )
        return nullcontext()

    @property
    @override
    def num_averaged(self) -> int:
        """The one process."""
        return 1

    @override
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return self.unwrap(model).state_dict()

    @property
    @override
    def is_replicated(self) -> bool:
        """There are no other ranks."""
        return True
