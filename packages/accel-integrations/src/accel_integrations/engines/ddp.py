"""Data parallel training: every rank holds a replica of the full model and reads different batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from accel_integrations.engines.engine import Engine, EngineContext
from accel_integrations.engines.placing import move_model
from accel_integrations.engines.sharded_engines import check_no_ulysses
from accel_integrations.parallel.full_state import (
    load_full_optimizer_state,
    unshard_optimizer_state,
    unshard_state_dict,
)
from accel_integrations.parallel.replicas import GradientAverager, redistribute_gradients
from accel_integrations.parallel.tensor import added_after_fsdp, ranks_of_fsdp
from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.prepared import Notes
from accel_ops.modules import model_has_dtensor
from accel_state.mesh_axes import MESH_AXES
from accel_state.warning import warn_user

DEVICES_WITHOUT_INDEX = ("cpu", "hpu")  # DistributedDataParallel takes no device_ids for these
AXES = ("dp_replicate", "cp", "sp", "tp")
UNUSED_PARAMETERS = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
MOST_NAMES = 12


class Replica(DistributedDataParallel):
    """torch's class under torch's name, with notes on two of its errors that say what to write in the program."""

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(module, *arguments, **options)
        self._reduced_names = [  # in the order in which torch numbers them; parameters may be frozen later
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is not None and hasattr(inner, name):
                error.add_note(
                    f"The model is inside the wrapper: write accelerator.unwrap_model(model).{name}. Compute losses with "
                    "model(...), because only then gradients are averaged."
                )
            raise

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As torch does, which finds here that parameters got no gradient in the step before."""
        try:
            return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as error:
            if (numbers := UNUSED_PARAMETERS.search(str(error))) is not None:
                error.add_note(self._note_on(list(map(int, numbers[1].split()))))
            raise

    def _note_on(self, numbers: list[int]) -> str:
        names = [self._reduced_names[number] for number in numbers if number < len(self._reduced_names)]
        shown = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if names[MOST_NAMES:] else "")
        return (
            f"Without a gradient in the last step: {shown}. If a step may leave parameters out, write Accelerator(kwargs_handlers="
            "[DistributedDataParallelKwargs(find_unused_parameters=True)]). If they never train, call requires_grad_(False) "
            "on them before prepare()."
        )

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle or copy is torch's class, so that a saved model loads where this library is not installed."""
        reduced: Any = super().__reduce_ex__(1)  # protocol 2 checks the class
        function, (_, *arguments), *state = reduced
        return function, (DistributedDataParallel, *arguments), *state


Replica.__name__ = Replica.__qualname__ = DistributedDataParallel.__name__


@final
class DDPEngine(Engine):
    """`torch.nn.parallel.DistributedDataParallel`, with gradients averaged while backward runs."""

    name = "ddp"
    allows_local_sgd = True
    accumulates_in_grad = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._averagers: Notes[nn.Module, GradientAverager] = Notes()

    @override
    def check(self) -> None:
        """Check that the mesh has only dimensions along which this engine can train.

        Raises:
            ValueError: It has others, which the message names.
        """
        config = self.context.state.parallelism_config
        if config is None:
            return
        check_no_ulysses(config, self.name)
        other_axes = set(MESH_AXES) - {
            *AXES,
            "dp_shard",
        }  # models may arrive sharded; what other axes mean, those know who add them
        axes = [axis for axis in config.active_mesh_dims if axis in other_axes]
        if axes:
            raise ValueError(
                f"ParallelismConfig uses {', '.join(axes)}, but the 'ddp' engine supports only {', '.join(AXES)}. Set the sizes of "
                "others to 1."
            )

    @property
    @override
    def shards_gradients(self) -> bool:
        """With tensor parallelism."""
        config = self.context.state.parallelism_config
        return config is not None and config.tp_enabled

    # ---- preparing ----------------------------------------------------------------------------------------------

    @override
    def check_model(self, model: nn.Module) -> None:
        """Check that a model is sharded if the mesh has a dimension of shards.

        Raises:
            ValueError: It is not, or over other ranks.
        """
        super().check_model(model)
        config = self.context.state.parallelism_config
        if config is not None and config.dp_shard_enabled and ranks_of_fsdp(model) == 1:
            raise ValueError(
                f"ParallelismConfig has dp_shard_size={config.dp_shard_size}, but {type(model).__name__} is not sharded, and the 'ddp' "
                "engine shards none. Pass FullyShardedDataParallelPlugin(fsdp_version=2), or use these processes for "
                "dp_replicate_size."
            )

    @override
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Move the model to the device, and wrap it in `DistributedDataParallel` if it has trainable parameters.

        A model that arrives sharded by FSDP 2 averages its gradients itself, but for those of what was added since.
        """
        device = self.context.state.device
        if device_placement:
            model = move_model(model, device)
        is_trainable = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation or not is_trainable:
            return model
        if model_has_dtensor(model):
            replicas = added_after_fsdp(model) if ranks_of_fsdp(model) > 1 else list(model.parameters())
            if replicas and self.num_averaged > 1:
                self._averagers[model] = GradientAverager(model, self.averaging_group, replicas)
            redistribute_gradients(model)  # FSDP and DTensors run their own collectives
            return model
        settings = self.context.handlers.ddp
        on_several = len({parameter.device for parameter in model.parameters()}) > 1  # by a device map
        index = None if on_several or device.type in DEVICES_WITHOUT_INDEX else device.index
        options: dict[str, Any] = {"device_ids": None if index is None else [index], "output_device": index}
        if settings is not None:
            options |= settings.to_kwargs()
        replica = Replica(model, process_group=self.averaging_group, **options)
        if settings is not None:
            from accel_integrations.engines.ddp_hooks import register_hook  # needs a torch with torch.distributed

            register_hook(replica, settings)
        return replica

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do not all-reduce gradients in backward; without effect on models that are not replicated."""
        if self._averagers and (averager := self._averagers.get(self.unwrap(model))) is not None:
            return averager.no_sync()
        context = getattr(model, "no_sync", None)
        return nullcontext() if context is None else context()

    @override
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Have the replicas all-reduce gradients."""
        return sync_next_backward(model)

    @override
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Let ranks that run out of batches early take part in the collectives of the others.

        Raises:
            ValueError: When the weights of accumulation windows are all-reduced as well.
        """
        if self.averaging is not None and self.averaging.communicates:
            raise ValueError(
                "join_uneven_inputs() cannot be combined with GradientAccumulationPlugin(average_over='weights'), "
                "because the weight of every accumulation window is all-reduced over all processes. Give all processes "
                "the same number of batches (even_batches=True), and pass weight=0 for batches without items."
            )
        return self._join([_replica_in(joinable) for joinable in joinables], even_batches)

    @contextmanager
    def _join(self, joinables: list[Any], even_batches: bool | None) -> Iterator[None]:
        from torch.distributed.algorithms.join import Join, Joinable

        for joinable in joinables:
            if not isinstance(joinable, Joinable):
                raise TypeError(
                    f"join_uneven_inputs() got an object of type {type(joinable).__name__}. Pass prepared models with "
                    "trainable parameters, and optimizers that are torch.distributed.algorithms.Joinable."
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
        """The batch samplers of the prepared loaders that have `even_batches`."""
        samplers = [getattr(loader, "batch_sampler", None) for loader in self.context.prepared.dataloaders]
        shards = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
        if len(shards) < len(samplers):
            warn_user(
                f"even_batches has no effect on {len(samplers) - len(shards)} prepared data loaders: it is only "
                "supported for map-style datasets, and these loaders read iterable ones or are fed by the main process."
            )
        return shards

    @property
    @override
    def num_averaged(self) -> int:
        """The number of replicas: ranks of a TP group hold one together."""
        config = self.context.state.parallelism_config
        if config is None or config.total_size == 1:
            return self.context.state.num_processes
        return config.total_size // config.tp_size

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    @override
    def is_replicated(self) -> bool:
        """Unless tensor parallelism shards layers, or a model came with DTensors."""
        return not self.shards_gradients and not any(map(model_has_dtensor, self.context.prepared.models))

    @override
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The full state dict on every rank; DTensors are all-gathered into CPU memory, one at a time."""
        return unshard_state_dict(self.unwrap(model).state_dict(), self.context.keeps_full_states)

    @override
    def sharded_weights(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """The shards of this rank, with tensor parallelism."""
        inner = self.unwrap(model)
        return inner.state_dict() if model_has_dtensor(inner) else None

    @override
    def full_optimizer_state(self, optimizer: AcceleratedOptimizer) -> dict[str, Any]:
        """The full state dict of an optimizer, DTensors all-gathered into CPU memory; all ranks must call this."""
        return unshard_optimizer_state(optimizer, self.context.keeps_full_states)

    @override
    def load_optimizer_state(self, optimizer: AcceleratedOptimizer, state: dict[str, Any]) -> None:
        """Load a full state dict; each rank keeps its shards of DTensors."""
        load_full_optimizer_state(optimizer, state)


def _replica_in(model: Any) -> Any:
    """The `DistributedDataParallel` inside a compiled model, or else the object itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, DistributedDataParallel) and not isinstance(model, type(inner)) else model


@contextmanager
def sync_next_backward(model: nn.Module) -> Iterator[None]:
    """A context in which a `DistributedDataParallel` all-reduces gradients although its forward ran under `no_sync`.

    Other models have nothing to all-reduce. A function, because it serves replicas that the program made itself, too.
    """
    replica = _replica_in(model)
    if not isinstance(replica, DistributedDataParallel):
        yield
        return
    before = replica.require_backward_grad_sync, replica.require_forward_param_sync
    replica.require_backward_grad_sync = replica.require_forward_param_sync = True
    replica.reducer.prepare_for_backward([])  # as the forward pass does outside of `no_sync`
    try:
        yield
    finally:
        replica.require_backward_grad_sync, replica.require_forward_param_sync = before
