"""Data parallel replicas: every process has the whole model and a share of the batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_integrations.engines.ddp_hooks import register_hook
from accel_integrations.engines.engine import Engine
from accel_ops.collectives import reduce
from accel_ops.modules import model_has_dtensor

DEVICES_WITHOUT_INDEX = ("cpu", "hpu")  # DistributedDataParallel takes no device_ids for these


@final
class DDPEngine(Engine):
    """`torch.nn.parallel.DistributedDataParallel`, with gradients averaged while backward runs."""

    name = "ddp"
    averages_parameters = True

    def check(self) -> None:
        """Refuse a mesh with axes other than that of the replicas.

        Raises:
            ValueError: Naming the axes.
        """
        config = self.context.state.parallelism_config
        if config is not None and config.total_size != config.dp_replicate_size:
            axes = [axis for axis in config.active_mesh_dims if axis != "dp_replicate"]
            raise ValueError(
                f"ParallelismConfig asks for {', '.join(axes)}, but the 'ddp' engine only knows replicas: set "
                "dp_replicate_size to the number of processes and leave the other sizes at 1."
            )

    # ---- preparing ----------------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Move the model to the device, and replicate it if it has anything to learn.

        Models of distributed tensors exchange what they must by themselves and are not replicated.
        """
        device = self.context.state.device
        if device_placement:
            model = model.to(device)
        learns = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation or not learns or model_has_dtensor(model):
            return model
        settings = self.context.handlers.ddp
        options = settings.to_kwargs() if settings is not None else {}
        if device.type not in DEVICES_WITHOUT_INDEX:
            options = {"device_ids": [device.index], "output_device": device.index, **options}
        replica = DistributedDataParallel(model, **options)
        if settings is not None:
            register_hook(replica, settings)
        return replica

    # ---- stepping -----------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local during backward; for models that were not replicated, do nothing."""
        context = getattr(model, "no_sync", None)
        return nullcontext() if context is None else context()

    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Let processes that run out of batches early shadow the collectives of the others.

        Raises:
            ValueError: When processes exchange the weights of every window as well.
        """
        if self.averaging is not None and self.averaging.communicates:
            raise ValueError(
                "join_uneven_inputs() cannot be combined with GradientAccumulationPlugin(average_over='weights'): all "
                "processes must take part in every window. Let loaders give all processes equally many batches "
                "(even_batches=True) and pass weight=0 for those without items."
            )
        return self._join([_replica_in(joinable) for joinable in joinables], even_batches)

    @contextmanager
    def _join(self, joinables: list[Any], even_batches: bool | None) -> Iterator[None]:
        from torch.distributed.algorithms.join import Join, Joinable

        for joinable in joinables:
            if not isinstance(joinable, Joinable):
                raise TypeError(
                    f"join_uneven_inputs() got an object of type {type(joinable).__name__}: pass prepared models that "
                    "have something to learn, and optimizers that are torch.distributed.algorithms.Joinable."
                )
        shards = self._batch_shards() if even_batches is not None else []
        before = [shard.even_batches for shard in shards]
        for shard in shards:
            shard.even_batches = even_batches
        try:
            with Join(joinables):
                yield
        finally:
            for shard, value in zip(shards, before, strict=True):
                shard.even_batches = value

    def _batch_shards(self) -> list[Any]:
        """What decides in the prepared loaders whether batches are filled up."""
        samplers = [getattr(loader, "batch_sampler", None) for loader in self.context.prepared.dataloaders]
        shards = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
        if len(shards) < len(samplers):
            warnings.warn(
                f"even_batches has no effect on {len(samplers) - len(shards)} prepared data loaders, which read "
                "iterable data sets or are fed by the main process.",
                stacklevel=7,
            )
        return shards

    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Add a weight up over all processes."""
        total: torch.Tensor = reduce(weight.to(self.context.state.device), reduction="sum")
        return total

    @property
    def num_averaged(self) -> int:
        """All processes."""
        return self.context.state.num_processes


def _replica_in(model: Any) -> Any:
    """The replica that a compiled model holds, or else the object itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, DistributedDataParallel) and not isinstance(model, type(inner)) else model


@contextmanager
def sync_in_backward(model: nn.Module) -> Iterator[None]:
    """A block in which the replicas of `model` exchange gradients although its forward ran under `no_sync`.

    Models that are no replicas have nothing to exchange. Not a method of the engine, because
    `Accelerator.trigger_sync_in_backward` is static.
    """
    replica = _replica_in(model)
    if not isinstance(replica, DistributedDataParallel):
        yield
        return
    before = replica.require_backward_grad_sync, replica.require_forward_param_sync
    replica.require_backward_grad_sync = replica.require_forward_param_sync = True
    replica.reducer.prepare_for_backward([])  # what the forward would have done, had it known
    try:
        yield
    finally:
        replica.require_backward_grad_sync, replica.require_forward_param_sync = before
