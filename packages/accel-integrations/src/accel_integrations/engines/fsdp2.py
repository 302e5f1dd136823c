"""Sharded training, version 2: `fully_shard` turns parameters into DTensors, in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.engines.engine import Engine
from accel_integrations.engines.fsdp2_model import Sharding, sharding_mesh, upcast_trainable
from accel_integrations.engines.placing import move_model
from accel_integrations.engines.sharded_engines import check_mesh, num_averaged, warn_no_join
from accel_integrations.training_state.formats.forms import full_model_state, model_state

if TYPE_CHECKING:
    from accel_state.settings.fsdp import FullyShardedDataParallelPlugin


@final
class FSDP2Engine(Engine):
    """`torch.distributed.fsdp.fully_shard`, over all ranks or over the sharding dimensions of the mesh."""

    name = "fsdp2"
    compiles_in_place = True

    @override
    def check(self) -> None:
        """Check that the mesh has a dimension along which parameters are sharded.

        Raises:
            ValueError: It has none; the message names the sizes.
        """
        check_mesh(self)

    @property
    @override
    def shards_gradients(self) -> bool:
        return True

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """The FSDP settings."""
        plugin: FullyShardedDataParallelPlugin = self.context.state.fsdp_plugin
        return plugin

    @cached_property
    def sharding(self) -> Sharding:
        """How models are sharded."""
        state = self.context.state
        return Sharding(self.plugin, sharding_mesh(state.parallelism_config, state.device.type), state.device)

    # ---- preparing ----------------------------------------------------------------------------------------------

    @override
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Shard the model, also for evaluation: it may be too large for one device."""
        if is_sharded(model) or not any(True for _ in model.parameters()):
            return move_model(model, self.context.state.device) if device_placement else model
        if self.context.state.mixed_precision != "no":
            upcast_trainable(model)
        return self.sharding.shard(model)

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do not reduce-scatter gradients in backward: each rank keeps its own unsharded gradients."""
        return _without_sync(model) if hasattr(model, "set_requires_gradient_sync") else nullcontext()

    @contextmanager
    @override
    def sync_next_backward(self, model: Any) -> Iterator[None]:
        """Reduce-scatter gradients in backward; this stays so until the next `no_sync`."""
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(True)
        yield

    @override
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Without effect but a warning: every forward pass needs all ranks."""
        return warn_no_join(self.name)

    @property
    @override
    def num_averaged(self) -> int:
        """All ranks; those of a TP group count once."""
        return num_averaged(self)

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    @override
    def sharded_form(self) -> Any:
        """The `state_dict_type` of the plugin."""
        return self.plugin.state_dict_type

    @property
    @override
    def is_replicated(self) -> bool:
        """Each rank holds a shard."""
        return False

    @override
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The full state dict in CPU memory on the main process; tensors on the meta device on the other ranks."""
        return full_model_state(self.unwrap(model))

    @override
    def sharded_weights(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        return model_state(self.unwrap(model))


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to any module of a model."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
