"""Data parallel replicas: every process has the whole model and a share of the batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_integrations.engines.engine import Engine
from accel_ops.collectives import reduce
from accel_state import shutdown

DEVICES_WITHOUT_INDEX = ("cpu", "hpu")  # DistributedDataParallel takes no device_ids for these


@final
class DDPEngine(Engine):
    """`torch.nn.parallel.DistributedDataParallel`, with gradients averaged while backward runs."""

    name = "ddp"
    averages_parameters = True

    # ---- preparing ----------------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Move the model to the device, and replicate it if it has anything to learn."""
        device = self.context.state.device
        if device_placement:
            model = model.to(device)
        if evaluation or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        settings = self.context.handlers.ddp
        options = settings.to_kwargs() if settings is not None else {}
        if device.type not in DEVICES_WITHOUT_INDEX:
            options = {"device_ids": [device.index], "output_device": device.index, **options}
        replica = DistributedDataParallel(model, **options)
        if settings is not None:
            settings.register_comm_hook(replica)
        shutdown.on_close(self.close)
        return replica

    # ---- stepping -----------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local during backward; for models that were not replicated, do nothing."""
        context = getattr(model, "no_sync", None)
        return nullcontext() if context is None else context()

    def sync_next_backward(self, model: nn.Module) -> None:
        """Make the next backward exchange gradients although its forward ran under `no_sync`."""
        replica = _replica_in(model)
        if replica is None:
            return
        replica.require_backward_grad_sync = True
        replica.require_forward_param_sync = True
        # what the forward would have done, had it known
        replica.reducer.prepare_for_backward([])

    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Let processes that run out of batches early shadow the collectives of the others."""
        return self._join(joinables, even_batches)

    @contextmanager
    def _join(self, joinables: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
        from torch.distributed.algorithms.join import Join

        with self._even_batches(even_batches), Join(list(joinables)):
            yield

    @contextmanager
    def _even_batches(self, even_batches: bool | None) -> Iterator[None]:
        """Have the prepared loaders that share out a map-style data set use another setting for a while."""
        if even_batches is None:
            yield
            return
        changed: list[tuple[Any, bool]] = []
        skipped = 0
        for loader in self.context.prepared.dataloaders:
            sampler: Any = getattr(loader, "batch_sampler", None)
            if hasattr(sampler, "even_batches"):
                changed.append((sampler, sampler.even_batches))
                sampler.even_batches = even_batches
            else:
                skipped += 1
        if skipped:
            warnings.warn(
                f"even_batches={even_batches!r} has no effect on {skipped} prepared data loaders, which read iterable "
                "data sets or are fed by the main process.",
                stacklevel=6,
            )
        try:
            yield
        finally:
            for sampler, value in changed:
                sampler.even_batches = value

    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Add a weight up over all processes."""
        return reduce(weight.to(self.context.state.device), reduction="sum")

    @property
    def num_averaged(self) -> int:
        """All processes."""
        return self.context.state.num_processes

    # ---- storing ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cut the replicas' ties to the process group, so that its threads can end."""
        for model in self.context.prepared.models:
            replica = _replica_in(model)
            if replica is not None:
                replica.__dict__.pop("reducer", None)
                replica.__dict__.pop("logger", None)


def _replica_in(model: nn.Module) -> DistributedDataParallel | None:
    """The replica that a prepared model is, or that a compiled one holds."""
    for candidate in (model, getattr(model, "_orig_mod", None)):
        if isinstance(candidate, DistributedDataParallel):
            return candidate
    return None
