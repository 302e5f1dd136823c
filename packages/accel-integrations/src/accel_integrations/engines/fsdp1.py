"""Sharded training, version 1: `FullyShardedDataParallel`, a wrapper that keeps the parameters of blocks flat."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from accel_integrations.engines.activation_checkpoint import checkpoint_blocks
from accel_integrations.engines.engine import Engine
from accel_integrations.engines.flat_parameters import FlatParameters
from accel_integrations.engines.fsdp2_model import sharding_mesh, upcast_trainable
from accel_integrations.engines.sharded_engines import check_mesh, num_averaged, refuse_join
from accel_integrations.engines.wrap_policy import find_blocks, resolve_policy
from accel_integrations.gradients import GradientGroup, clip_groups_
from accel_integrations.parallel.module_states import check_module_states, sync_module_states

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_integrations.engines.engine import EngineContext
    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_state.settings.fsdp import FullyShardedDataParallelPlugin


@final
class FSDP1Engine(Engine):
    """`torch.distributed.fsdp.FullyShardedDataParallel`."""

    name = "fsdp1"
    accepts_transforms = False
    compiles_in_place = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._flat = FlatParameters()

    def check(self) -> None:
        """Refuse a mesh of more than copies and shards, which version 1 cannot be combined with.

        Raises:
            ValueError: Naming the axes.
        """
        check_mesh(self)
        config = self.context.state.parallelism_config
        others = [] if config is None else [axis for axis in config.active_mesh_dims if not axis.startswith("dp_")]
        if others:
            raise ValueError(
                f"ParallelismConfig asks for {', '.join(others)}, but version 1 of FSDP knows only dp_replicate and "
                "dp_shard: choose FullyShardedDataParallelPlugin(fsdp_version=2)."
            )

    @property
    def shards_gradients(self) -> bool:
        """Each rank holds a shard of every gradient."""
        return True

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """How parameters are sharded, as the program asked."""
        plugin: FullyShardedDataParallelPlugin = self.context.state.fsdp_plugin
        return plugin

    # ---- preparing ----------------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Wrap the model, also one that is only evaluated: it may be too large to be held whole."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return model
        if not any(True for _ in model.parameters()):
            return model.to(self.context.state.device)
        if self.context.state.mixed_precision != "no":
            upcast_trainable(model)
        policy = resolve_policy(self.plugin, model)
        self._sync_module_states(model)
        blocks = find_blocks(model, policy) if self.plugin.activation_checkpointing else []
        before = FlatParameters.remember(model)
        try:
            wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, **self._options())
        except ValueError as error:
            if self.plugin.use_orig_params or all(one.requires_grad for one in model.parameters()):
                raise
            raise ValueError(
                f"{type(model).__name__} has frozen and trainable parameters in one block, which version 1 of FSDP only "
                "shards with FullyShardedDataParallelPlugin(use_orig_params=True) (--fsdp_use_orig_params true); or "
                "choose fsdp_version=2."
            ) from error
        checkpoint_blocks(wrapped, blocks)
        self._flat.note(before, wrapped)
        if not self.plugin.use_orig_params:
            for optimizer in self.context.prepared.optimizers:
                self._flat.rebind(optimizer)
        return wrapped

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """Wrap an optimizer, of the parameters that there are now."""
        if not self.plugin.use_orig_params:
            self._flat.rebind(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def _sync_module_states(self, model: nn.Module) -> None:
        """Give all processes the first one's values where torch does not: on the CPU, and where nobody asked it to."""
        if self.context.state.device.type == "cpu" or not self.plugin.sync_module_states:
            check_module_states(model, [None])
            sync_module_states(model, [None], self.context.state.device)

    def _options(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffload, ShardingStrategy

        plugin, device = self.plugin, self.context.state.device
        strategy: Any = plugin.sharding_strategy
        config = self.context.state.parallelism_config
        if config is not None and config.dp_replicate_enabled:
            hybrid = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}
            strategy = ShardingStrategy[hybrid.get(strategy.name, strategy.name)]
        on_cpu = device.type == "cpu"
        return {
            "sharding_strategy": strategy,
            "cpu_offload": CPUOffload(offload_params=False) if on_cpu else plugin.cpu_offload,
            "mixed_precision": plugin.mixed_precision_policy,
            "backward_prefetch": plugin.backward_prefetch,
            "forward_prefetch": plugin.forward_prefetch,
            "limit_all_gathers": plugin.limit_all_gathers,
            "use_orig_params": plugin.use_orig_params,
            "sync_module_states": bool(plugin.sync_module_states) and not on_cpu,
            "param_init_fn": None if on_cpu else plugin.param_init_fn,
            "ignored_modules": plugin.ignored_modules,
            "device_id": device,
            "device_mesh": self._mesh("HYBRID" in strategy.name),
        }

    def _mesh(self, is_hybrid: bool) -> DeviceMesh | None:
        """All processes, or copies by shards: those of the configuration, else a copy on each machine."""
        from torch.distributed.device_mesh import init_device_mesh

        state = self.context.state
        if is_hybrid and (state.parallelism_config is None or not state.parallelism_config.dp_replicate_enabled):
            size = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
            names = ("dp_replicate", "dp_shard")
            return init_device_mesh(state.device.type, (state.num_processes // size, size), mesh_dim_names=names)
        return sharding_mesh(state.parallelism_config, state.device.type)

    # ---- stepping -----------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep the gradients of this process whole and to itself during backward."""
        context = getattr(model, "no_sync", None)
        return nullcontext() if context is None else context()

    @contextmanager
    def sync_next_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce-scatter gradients in backward although the forward was told not to."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        modules: list[Any] = FullyShardedDataParallel.fsdp_modules(getattr(model, "_orig_mod", model))
        before = [module._sync_gradients for module in modules]
        for module in modules:
            module._sync_gradients = True
        try:
            yield
        finally:
            for module, value in zip(modules, before, strict=True):
                module._sync_gradients = value

    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Not possible: every forward needs all processes."""
        return refuse_join(self.name)

    @property
    def num_averaged(self) -> int:
        """All ranks: nothing but data and shards is parallel here."""
        return num_averaged(self)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Bound the joint norm of what all processes hold."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        process_groups = self._process_groups()
        groups: dict[Any, GradientGroup] = {}
        for parameter in chosen:
            if parameter.grad is not None:
                group = process_groups.get(id(parameter))
                key = id(group)
                if key not in groups:
                    groups[key] = GradientGroup(process_groups=() if group is None else (group,))
                groups[key].parts.append(parameter.grad)
        sharded = {id(group): group for group in process_groups.values()}
        for key, group in sharded.items():  # all take part, also those whose part of the parameters is empty
            groups.setdefault(key, GradientGroup(process_groups=(group,)))
        return clip_groups_(
            [groups[key] for key in sorted(groups, key=lambda key: key in sharded)], max_norm, norm_type
        )

    def _process_groups(self) -> dict[int, Any]:
        """Over which processes a parameter is divided, by its id; whole ones are left out."""
        found = {}
        for handle in self._handles():
            if handle.uses_sharded_strategy:
                for parameter in (handle.flat_param, *(handle.flat_param._params or ())):
                    found[id(parameter)] = handle.process_group
        return found

    def _handles(self) -> Iterator[Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        for model in self.context.prepared.wrapped:
            for module in FullyShardedDataParallel.fsdp_modules(model):
                if module._handle is not None:
                    yield module._handle

    # ---- storing ------------------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole model's tensors in CPU memory, on the main process; nothing on the others."""
        return full_model_state(self._wrapped(model))

    def _wrapped(self, model: nn.Module) -> nn.Module:
        for inner, wrapped in zip(self.context.prepared.models, self.context.prepared.wrapped, strict=False):
            if model is inner or model is wrapped:
                return wrapped
        return model

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
