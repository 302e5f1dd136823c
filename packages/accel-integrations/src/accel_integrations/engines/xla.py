"""Training through torch_xla: on one device, data parallel over processes, and over the devices of one process by SPMD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import nn
from typing_extensions import override

from accel_data.global_batches import with_global_batches
from accel_integrations.engines.engine import Engine
from accel_integrations.engines.placing import move_plain_tensors
from accel_integrations.engines.sharded_engines import find_blocks, resolve_policy
from accel_ops.collectives.tensors import reduce
from accel_ops.nested import recursively_apply
from accel_state.devices import XlaKind, device_kind
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_integrations.prepared.scheduler import AcceleratedScheduler
    from accel_integrations.training_state.interface import LoadRequest, PendingLoad
    from accel_state.settings.data import DataLoaderConfiguration
    from accel_state.settings.fsdp import FullyShardedDataParallelPlugin

FSDP_AXIS = "fsdp"
"""The axis of torch_xla's mesh along which it shards parameters, and batches too."""
DATA_AXIS = "data"
"""The axis of the mesh that is made here for replicated parameters."""


@final
class XlaEngine(Engine):
    """torch_xla.

    Operations are recorded, and compiled and run together when a loader asks for the next batch. Under SPMD one process
    drives several devices and computes on global batches: losses and gradients are those of all devices, so nothing
    is left to reduce. Otherwise there is one process for each device, and gradients are all-reduced when a step is due.
    """

    name = "xla"
    unguarded_because = "asking whether gradients are finite would end the recorded program in the middle of each step"
    accepts_transforms = False
    accumulates_in_grad = True
    dispatches_streams = False

    # ---- before anything starts ---------------------------------------------------------------------------------

    @override
    def check(self) -> None:
        """Check that the settings can be combined on XLA devices.

        Raises:
            ValueError: They cannot; the message names the setting and what to do.
            NotImplementedError: For SPMD over several machines.
        """
        import torch_xla.runtime as xr

        plugin = self.plugin
        if plugin is not None:
            _check_plugin(plugin)
        if not self.is_spmd:
            if plugin is not None:
                raise ValueError(
                    "FullyShardedDataParallelPlugin shards parameters on XLA devices by SPMD, which is off. Call "
                    "torch_xla.runtime.use_spmd() at the start of the program, or set XLA_USE_SPMD=1."
                )
            return
        if xr.process_count() > 1:
            raise NotImplementedError(
                f"SPMD over {xr.process_count()} machines is not supported: leave out use_spmd() and XLA_USE_SPMD, so that "
                "there is one process for each device."
            )

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How parameters are sharded; None replicates them."""
        return cast("FullyShardedDataParallelPlugin | None", self.context.state.fsdp_plugin)

    @property
    def is_spmd(self) -> bool:
        """Whether this process drives all devices.

        Raises:
            RuntimeError: This was chosen after the device.
        """
        return cast("XlaKind", device_kind("xla")).is_spmd()

    @cached_property
    def mesh(self) -> Any:
        """The mesh of torch_xla: the global one, or else all devices along one axis.

        Raises:
            ValueError: Parameters are to be sharded, and the global one has no axis for it.
        """
        import numpy as np
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        mesh = xs.get_global_mesh()
        if mesh is None:
            count = xr.global_runtime_device_count()
            axis = DATA_AXIS if self.plugin is None else FSDP_AXIS
            return xs.Mesh(np.arange(count), (count,), (axis,))
        if self.plugin is not None and FSDP_AXIS not in mesh.axis_names:
            raise ValueError(
                f"The global mesh has the axes {', '.join(map(repr, mesh.axis_names))}, but parameters are sharded along "
                f"{FSDP_AXIS!r}. Name an axis so in torch_xla's Mesh, or leave set_global_mesh() out."
            )
        return mesh

    @property
    def batch_axis(self) -> str:
        """The axis of the mesh along which batches are sharded."""
        names = self.mesh.axis_names
        return next((name for name in (FSDP_AXIS, DATA_AXIS) if name in names), names[0])

    @property
    def num_shares(self) -> int:
        """How many devices of this process compute on different samples."""
        return int(self.mesh.shape()[self.batch_axis]) if self.is_spmd else 1

    # ---- preparing ----------------------------------------------------------------------------------------------

    @override
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Move the model to the device; under SPMD, shard its parameters or mark them as replicated."""
        is_spmd = self.is_spmd
        if device_placement:
            move_plain_tensors(model, self.context.state.device)  # `Module.to` would untie parameters
        if not is_spmd or any(_sharding_of(parameter) for parameter in model.parameters()):
            return model
        if self.plugin is not None:
            return self._shard(model, self.plugin)
        for parameter in model.parameters():
            _mark(parameter, self.mesh, (None,) * parameter.ndim)
        return model

    def _shard(self, model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> nn.Module:
        from torch_xla.distributed.fsdp import checkpoint_module
        from torch_xla.distributed.spmd.xla_sharding import apply_backward_optimization_barrier
        from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

        for block in find_blocks(model, resolve_policy(plugin, model)):
            apply_backward_optimization_barrier(block)  # gradients of one block at a time are in memory
            block.register_forward_hook(self._shard_outputs)
            if plugin.activation_checkpointing:
                checkpoint_module(block)
        forward = model.__dict__.pop("forward", None)  # that under autocast is a function, and a method is looked for
        wrapped = SpmdFullyShardedDataParallel(model, mesh=self.mesh, shard_output=self._shard_output)
        if forward is not None:
            model.forward = forward
        return wrapped

    def _shard_outputs(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._shard_output(output, self.mesh)

    def _shard_output(self, output: Any, mesh: Any) -> None:
        """Shard the tensors of an output along the batch, so that parameters are gathered rather than activations."""

        def shard(tensor: torch.Tensor) -> None:
            if tensor.ndim and tensor.shape[0] % self.num_shares == 0 and not _sharding_of(tensor):
                _mark(tensor, mesh, (self.batch_axis, *(None,) * (tensor.ndim - 1)))

        recursively_apply(shard, output)

    def _partition_of(self, parameter: torch.Tensor) -> tuple[str | None, ...]:
        """Along which axis each dimension is sharded: under FSDP the largest one, as torch_xla chooses it."""
        partition: list[str | None] = [None] * parameter.ndim
        if self.plugin is not None and parameter.ndim and "devices" in _sharding_of(parameter):
            partition[parameter.shape.index(max(parameter.shape))] = FSDP_AXIS
        return tuple(partition)

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """Wrap an optimizer, which steps without torch's fused kernels: there are none, and XLA fuses by itself."""
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    @override
    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler, which steps once for the batch of each device."""
        wrapped = super().prepare_scheduler(scheduler)
        wrapped.count_devices(self.num_shares)
        return wrapped

    @override
    def start_loader(self, loader: DataLoader[Any], settings: DataLoaderConfiguration) -> DataLoader[Any]:
        """A loader of global batches, all of one size: another size would be compiled again.

        Raises:
            ValueError: Batches are to be dispatched, or cannot be split over the devices.
        """
        if self.data_shard().count > 1:
            if settings.dispatch_batches:
                raise ValueError(
                    "dispatch_batches=True sends batches between processes, which XLA devices do not support: leave it out."
                )
            return loader  # the shards of processes are padded by themselves
        num_shares = self.num_shares
        if not settings.split_batches:
            return with_global_batches(loader, num_shares, settings.even_batches)
        if loader.batch_size is not None and loader.batch_size % num_shares:
            raise ValueError(
                f"split_batches=True cannot split batches of {loader.batch_size} evenly over {num_shares} devices. Choose a "
                f"batch size that is a multiple of {num_shares}, or set split_batches=False."
            )
        return with_global_batches(loader, 1, settings.even_batches)

    @override
    def finish_loader(self, loader: Any) -> Any:
        """Have batches copied to the device when they are used, each device its share."""
        from accel_integrations.engines.xla_loader import MpDeviceLoaderWrapper

        if loader.device is None:  # without device placement
            return loader
        device, loader.device = loader.device, None
        return MpDeviceLoaderWrapper(loader, device, self._input_sharding if self.is_spmd else None)

    def _input_sharding(self, tensor: torch.Tensor) -> Any:
        import torch_xla.distributed.spmd as xs

        if not tensor.ndim or tensor.shape[0] % self.num_shares:
            return None
        return xs.ShardingSpec(self.mesh, (self.batch_axis, *(None,) * (tensor.ndim - 1)))

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Take an optimizer step, after averaging gradients over all processes."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._average(parameters)
        stepped = super().step(optimizer, closure)
        self.gradient_state.is_xla_gradients_synced = False
        self._averaged.difference_update(map(id, parameters))
        if not self.gradient_state.in_dataloader:  # where no loader does it, steps would be recorded without end
            _xla().sync()
        return stepped

    @override
    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the total norm of gradients, after averaging them over all processes."""
        return super().clip_grad_norm_(self._average(parameters), max_norm, norm_type)

    @override
    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip every element of gradients, after averaging them over all processes."""
        super().clip_grad_value_(self._average(parameters), clip_value)

    @cached_property
    def _averaged(self) -> set[int]:
        """Parameters whose gradients were averaged since the last step, by id."""
        return set()

    def _average(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
        """Average gradients over all processes, each once in a step; returns the parameters."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self.gradient_state.sync_gradients:
            return chosen
        if self.num_averaged > 1:
            left = [one for one in chosen if one.grad is not None and id(one) not in self._averaged]
            if left:
                gradients = [one.grad for one in left]
                _xla("core.xla_model").all_reduce("sum", gradients, scale=1.0 / self.num_averaged)
            self._averaged.update(map(id, left))
        self.gradient_state.is_xla_gradients_synced = True
        return chosen

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without effect: gradients are all-reduced before the optimizer step."""
        return nullcontext()

    @override
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without effect, as `no_sync`."""
        return nullcontext()

    @override
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Without effect, with a warning."""
        warn_user(
            f"join_uneven_inputs() has no effect with the {self.name!r} engine. Give all processes the same number of batches "
            "(even_batches=True)."
        )
        return nullcontext()

    @property
    @override
    def num_averaged(self) -> int:
        """All processes; under SPMD there is one, whose gradients are those of all devices."""
        return self.context.state.num_processes

    @override
    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.num_averaged == 1 else reduce(weight.to(self.context.state.device))

    @override
    def mean_over_tokens(self, loss: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
        """The mean loss (0-dim) of one process.

        Raises:
            NotImplementedError: With several.
        """
        if self.num_averaged > 1:
            raise NotImplementedError(
                "mean_over_tokens() is not supported over several XLA processes. Use SPMD, under which a loss is that of all "
                "devices, or GradientAccumulationPlugin(average_over='weights')."
            )
        return super().mean_over_tokens(loss, num_tokens)

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    @override
    def is_replicated(self) -> bool:
        """Every process can read full states."""
        return True

    @override
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The full state dict in CPU memory; tied parameters stay tied."""
        _xla().sync(wait=True)
        moved: dict[int, torch.Tensor] = {}
        state_dict = self.unwrap(model).state_dict(keep_vars=True)
        return {name: moved.setdefault(id(value), _to_cpu(value)) for name, value in state_dict.items()}

    @override
    def full_optimizer_state(self, optimizer: AcceleratedOptimizer) -> dict[str, Any]:
        """The full state of an optimizer in CPU memory."""
        _xla().sync(wait=True)
        return cast("dict[str, Any]", recursively_apply(_to_cpu, optimizer.state_dict()))

    @override
    def load_optimizer_state(self, optimizer: AcceleratedOptimizer, state: dict[str, Any]) -> None:
        """Load a full state; under SPMD it is sharded like the parameters."""
        super().load_optimizer_state(optimizer, state)
        if not self.is_spmd:
            return
        for parameter, values in optimizer.state.items():
            for value in values.values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    _mark(value, self.mesh, self._partition_of(parameter))

    @override
    def open(self, request: LoadRequest) -> PendingLoad:
        """Read the states into CPU memory, whatever the location: from there they are sharded."""
        return super().open(replace(request, location=torch.device("cpu")))


def _check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise a ValueError for settings of FSDP that torch_xla's sharding does not have."""
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version={plugin.fsdp_version} does not train on XLA devices: pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    offloads = type(plugin.cpu_offload).__name__ != "OffloadPolicy" and bool(plugin.cpu_offload)
    refused = {
        "cpu_offload": offloads,
        "activation_checkpointing_offload": plugin.activation_checkpointing_offload,
        "mixed_precision_policy": plugin.mixed_precision_policy is not None and not plugin.precision_from_run,
        "ignored_modules": plugin.ignored_modules is not None,
    }
    names = [name for name, is_set in refused.items() if is_set]
    if names:
        raise ValueError(
            f"FullyShardedDataParallelPlugin({', '.join(f'{name}=...' for name in names)}) has no effect on XLA devices. "
            "Leave it out; bfloat16 is Accelerator(mixed_precision='bf16')."
        )


def _mark(tensor: torch.Tensor, mesh: Any, partition: tuple[str | None, ...]) -> None:
    import torch_xla.distributed.spmd as xs

    xs.mark_sharding(tensor, mesh, partition)


def _sharding_of(tensor: torch.Tensor) -> str:
    """How a tensor is sharded, as torch_xla writes it; empty when that was not said."""
    return cast(str, _xla()._XLAC._get_xla_sharding_spec(tensor)) if tensor.device.type == "xla" else ""


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _xla(part: str = "") -> Any:
    """torch_xla, or a module of it."""
    return import_module(f"torch_xla.{part}" if part else "torch_xla")
