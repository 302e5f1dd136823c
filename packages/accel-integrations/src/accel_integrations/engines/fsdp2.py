"""Sharded training, version 2: `fully_shard` turns parameters into distributed tensors, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from accel_integrations.checkpoints.pending import CheckpointFiles, PendingLoad, PendingSave, warn_of_unused
from accel_integrations.checkpoints.sharded_states import (
    ShardedStatesLoad,
    ShardedStatesSave,
    check_shared_folder,
    refuse_deepspeed_states,
    strict_of,
)
from accel_integrations.checkpoints.state_forms import full_model_state
from accel_integrations.engines.engine import Engine
from accel_integrations.engines.fsdp2_model import Sharding, sharding_mesh, upcast_trainable
from accel_integrations.engines.sharded_engines import check_mesh, num_averaged, refuse_join

if TYPE_CHECKING:
    from accel_state.settings.fsdp import FullyShardedDataParallelPlugin


@final
class FSDP2Engine(Engine):
    """`torch.distributed.fsdp.fully_shard`, over all processes or over the sharding axes of the mesh."""

    name = "fsdp2"
    compiles_in_place = True

    def check(self) -> None:
        """Refuse a mesh in which processes would hold whole copies, or sequences that another library shares.

        Raises:
            ValueError: Naming the sizes.
        """
        check_mesh(self)

    @property
    def shards_gradients(self) -> bool:
        """Each rank holds a shard of every gradient."""
        return True

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """How parameters are sharded, as the program asked."""
        plugin: FullyShardedDataParallelPlugin = self.context.state.fsdp_plugin
        return plugin

    @cached_property
    def sharding(self) -> Sharding | None:
        """How models are sharded; None where the mesh has no axis for it."""
        state = self.context.state
        mesh = sharding_mesh(state.parallelism_config, state.device.type)
        return None if mesh is None else Sharding(self.plugin, mesh, state.device)

    # ---- preparing ----------------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Shard the model, also one that is only evaluated: it may be too large to be held whole."""
        if self.sharding is None or is_sharded(model) or not any(True for _ in model.parameters()):
            return model.to(self.context.state.device) if device_placement else model
        if self.context.state.mixed_precision != "no":
            upcast_trainable(model)
        return self.sharding.shard(model)

    # ---- stepping -----------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep the gradients of this process whole and to itself during backward."""
        return _without_sync(model) if hasattr(model, "set_requires_gradient_sync") else nullcontext()

    @contextmanager
    def sync_next_backward(self, model: Any) -> Iterator[None]:
        """Reduce-scatter gradients in backward; afterwards too, unless a block says otherwise again."""
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(True)
        yield

    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Not possible: every forward needs all processes."""
        return refuse_join(self.name)

    @property
    def num_averaged(self) -> int:
        """All processes but those that share layers."""
        return num_averaged(self)

    # ---- storing ------------------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole model's tensors in CPU memory, on the main process; nothing on the others."""
        return full_model_state(self.unwrap(model))

    def check_storage(self, sees_main: bool, folder: Path) -> None:
        """All ranks write into one folder."""
        check_shared_folder(sees_main, folder)

    def save(self, options: Mapping[str, Any]) -> PendingSave:
        """Have each rank write its shards, in the form that the plugin names."""
        warn_of_unused(options)
        return ShardedStatesSave(self.context.prepared, self.plugin.state_dict_type)

    def open(
        self,
        checkpoint: CheckpointFiles,
        location: torch.device,
        load_kwargs: Mapping[str, Any],
        model_kwargs: Mapping[str, Any],
    ) -> PendingLoad:
        """Have each rank read its shards, from any form but DeepSpeed's."""
        refuse_deepspeed_states(checkpoint)
        return ShardedStatesLoad(checkpoint, self.context.prepared, strict_of(model_kwargs))


def is_sharded(model: nn.Module) -> bool:
    """Whether any part of a model went through `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
