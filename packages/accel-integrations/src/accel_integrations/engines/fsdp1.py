"""Sharded training, version 1: `FullyShardedDataParallel`, a wrapper with one flat parameter per block."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from accel_integrations.engines.engine import Engine
from accel_integrations.engines.fsdp2 import sharding_mesh, upcast_trainable
from accel_integrations.engines.sharded_engines import (
    check_mesh,
    checkpoint_blocks,
    find_blocks,
    num_averaged,
    resolve_policy,
    warn_no_join,
)
from accel_integrations.gradients import GradientGroup, clip_groups_
from accel_integrations.parallel.module_states import check_module_states, sync_module_states
from accel_integrations.prepared.library_views import PlainModuleNames
from accel_integrations.prepared.parameters import plain_name
from accel_integrations.prepared.prepared import Notes
from accel_integrations.training_state.formats.forms import full_model_state
from accel_ops.modules import modules_among
from accel_ops.tied import ensure_weights_retied

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

    @override
    def check(self) -> None:
        """Check that the mesh has no dimensions but "dp_replicate" and "dp_shard".

        Raises:
            ValueError: It has others, which the message names.
        """
        config = self.context.state.parallelism_config
        others = [] if config is None else [axis for axis in config.active_mesh_dims if not axis.startswith("dp_")]
        if others:
            raise ValueError(
                f"ParallelismConfig uses {', '.join(others)}, but FSDP version 1 supports only dp_replicate and "
                "dp_shard. Choose FullyShardedDataParallelPlugin(fsdp_version=2)."
            )
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

    # ---- preparing ----------------------------------------------------------------------------------------------

    @override
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Wrap the model, also for evaluation: it may be too large for one device."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return model
        if not any(True for _ in model.parameters()):
            return model.to(self.context.state.device)
        if self.context.state.mixed_precision != "no":
            upcast_trainable(model)
        policy = resolve_policy(self.plugin, model)
        # Weights are broadcast while they have their shapes; FSDP flattens them.
        self._sync_module_states(model)
        blocks = find_blocks(model, policy) if self.plugin.activation_checkpointing else []
        ignored = modules_among(self.plugin.ignored_modules, model)
        for module in ignored:  # which torch leaves where they are
            module.to(self.context.state.device)
        # An optimizer made before holds the parameters that are flattened next: remember which is where.
        before = FlatParameters.remember(model)
        try:
            wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, **self._options(model, ignored))
        except ValueError as error:
            if self.plugin.use_orig_params or all(weight.requires_grad for weight in model.parameters()):
                raise
            raise ValueError(
                f"{type(model).__name__} has frozen and trainable parameters in one block, which FSDP version 1 can "
                "shard only with FullyShardedDataParallelPlugin(use_orig_params=True) (--fsdp_use_orig_params true). "
                "Set that, or choose fsdp_version=2."
            ) from error
        # Inside of the FSDP units, so that recomputing a block finds its parameters gathered.
        checkpoint_blocks(wrapped, blocks)
        model.named_modules = PlainModuleNames(model)  # type: ignore[method-assign]
        self._flat.note(before, wrapped)
        if not self.plugin.use_orig_params:
            for optimizer in self.context.prepared.optimizers:
                self._flat.rebind(optimizer)
        return wrapped

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """Wrap an optimizer, after replacing its parameters by flat ones."""
        if not self.plugin.use_orig_params:
            self._flat.rebind(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    @override
    def flattens_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        flat = {id(handle.flat_param) for handle in self._handles()} | self._process_groups().keys()
        return any(id(weight) in flat for group in optimizer.param_groups for weight in group["params"])

    def _sync_module_states(self, model: nn.Module) -> None:
        """Broadcast module states from rank 0 where torch does not: on the CPU, and without `sync_module_states`."""
        if self.context.state.device.type == "cpu" or not self.plugin.sync_module_states:
            check_module_states(model, [None])
            sync_module_states(model, [None], self.context.state.device)

    def _options(self, model: nn.Module, ignored: Sequence[nn.Module]) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffload, ShardingStrategy

        plugin, device = self.plugin, self.context.state.device
        strategy: Any = plugin.sharding_strategy
        config = self.context.state.parallelism_config
        if config is not None and config.dp_replicate_enabled:
            hybrid = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}
            strategy = ShardingStrategy[hybrid.get(strategy.name, strategy.name)]
        on_cpu = device.type == "cpu"
        init = None if on_cpu else plugin.param_init_fn
        return {
            "sharding_strategy": strategy,
            "cpu_offload": CPUOffload(offload_params=False) if on_cpu else plugin.cpu_offload,
            "mixed_precision": plugin.mixed_precision_policy,
            "backward_prefetch": plugin.backward_prefetch,
            "forward_prefetch": plugin.forward_prefetch,
            "limit_all_gathers": plugin.limit_all_gathers,
            "use_orig_params": plugin.use_orig_params,
            "sync_module_states": bool(plugin.sync_module_states) and not on_cpu,
            "param_init_fn": None if init is None else ensure_weights_retied(init, model, device),
            "ignored_modules": list(ignored) or None,
            "device_id": device,
            "device_mesh": self._mesh("HYBRID" in strategy.name),
        }

    def _mesh(self, is_hybrid: bool) -> DeviceMesh | None:
        """All ranks, or replicas by shards: sizes of the configuration, else one replica on each machine."""
        from torch.distributed.device_mesh import init_device_mesh

        state = self.context.state
        if is_hybrid and (state.parallelism_config is None or not state.parallelism_config.dp_replicate_enabled):
            size = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
            names = ("dp_replicate", "dp_shard")
            return init_device_mesh(state.device.type, (state.num_processes // size, size), mesh_dim_names=names)
        return sharding_mesh(state.parallelism_config, state.device.type)

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do not reduce-scatter gradients in backward: each rank keeps its own unsharded gradients."""
        context = getattr(model, "no_sync", None)
        return nullcontext() if context is None else context()

    @contextmanager
    @override
    def sync_next_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce-scatter gradients in backward although the forward pass ran under `no_sync`."""
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

    @override
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Without effect but a warning: every forward pass needs all ranks."""
        return warn_no_join(self.name)

    @property
    @override
    def num_averaged(self) -> int:
        """All ranks: there is no other parallelism here."""
        return num_averaged(self)

    @override
    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the total gradient norm over the shards of all ranks."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        process_groups = self._process_groups()
        groups: dict[Any, GradientGroup] = {}
        for parameter in chosen:
            if parameter.grad is not None:
                group = process_groups.get(id(parameter))
                key = id(group)
                if key not in groups:
                    groups[key] = GradientGroup(process_groups=() if group is None else (group,))
                groups[key].shards.append(parameter.grad)
        sharded = {id(group): group for group in process_groups.values()}
        for key, group in sharded.items():  # all ranks take part in the all-reduce, also those with empty shards
            groups.setdefault(key, GradientGroup(process_groups=(group,)))
        return clip_groups_(
            [groups[key] for key in sorted(groups, key=lambda key: key in sharded)],
            max_norm,
            norm_type,
            self.clips_only_finite,
        )

    def _process_groups(self) -> dict[int, Any]:
        """The process group over which a parameter is sharded, by the parameter's id; unsharded ones are left out."""
        groups = {}
        for handle in self._handles():
            if handle.uses_sharded_strategy:
                for parameter in (handle.flat_param, *(handle.flat_param._params or ())):
                    groups[id(parameter)] = handle.process_group
        return groups

    @override
    def named_gradients(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Of flat parameters, the slices of those that they have replaced."""
        if self.plugin.use_orig_params:
            yield from super().named_gradients(model)
            return
        for prefix, handle in flat_handles(model):
            flat: Any = handle.flat_param
            for name, info in zip(flat._fqns, flat._shard_param_infos, strict=True):
                if flat.grad is not None and info.in_shard:
                    slice_ = flat.grad[info.offset_in_shard :][: info.numel_in_shard]
                    yield prefix + plain_name(name), slice_

    def _handles(self) -> Iterator[Any]:
        for model in self.context.prepared.wrapped:
            yield from (handle for _, handle in flat_handles(model))

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    @override
    def sharded_form(self) -> Any:
        """The `state_dict_type` of the plugin."""
        return self.plugin.state_dict_type

    @override
    def built_names(self, optimizer: torch.optim.Optimizer) -> Sequence[Sequence[str]] | None:
        """The names of the parameters that flat ones have replaced."""
        return self._flat.built_names(optimizer)

    @property
    @override
    def is_replicated(self) -> bool:
        """Each rank holds a shard."""
        return False

    @override
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The full state dict in CPU memory on the main process; tensors on the meta device on the other ranks."""
        return full_model_state(self._wrapped(model))

    def _wrapped(self, model: nn.Module) -> nn.Module:
        for inner, wrapped in zip(self.context.prepared.models, self.context.prepared.wrapped, strict=False):
            if model is inner or model is wrapped:
                return wrapped
        return model


class FlatParameters:
    """Maps each original parameter to the flat parameter that contains it, for optimizers made before wrapping."""

    def __init__(self) -> None:
        self._flat_of: Any = WeakIdKeyDictionary()
        self._name_of: Any = WeakIdKeyDictionary()
        self._names_in: Any = WeakIdKeyDictionary()
        self._built: Notes[torch.optim.Optimizer, list[list[str]]] = Notes()

    def __reduce__(self) -> Any:
        return type(self), ()  # a pickled copy has other parameters, none of them flattened

    @staticmethod
    def remember(model: nn.Module) -> dict[str, weakref.ref[nn.Parameter]]:
        """Weak references to the parameters of a model by name, for `note`."""
        return {name: weakref.ref(weight) for name, weight in model.named_parameters(remove_duplicate=False)}

    def note(self, before: dict[str, weakref.ref[nn.Parameter]], wrapped: nn.Module) -> None:
        """Record which flat parameter contains each parameter.

        Args:
            before: From `remember`.
            wrapped: The wrapped model.
        """
        for prefix, handle in flat_handles(wrapped):
            flat: Any = handle.flat_param
            self._names_in[flat] = [prefix + plain_name(inner) for inner in flat._fqns]
            for inner in flat._fqns:
                reference = before.get(prefix + plain_name(inner))
                if reference is not None and (old := reference()) is not None:
                    self._flat_of[old] = flat
                    self._name_of[old] = prefix + plain_name(inner)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace parameters of an optimizer by the flat parameters that contain them.

        Raises:
            ValueError: When parameters of different groups are in one flat parameter, or have state already.
        """
        if not any(weight in self._flat_of for group in optimizer.param_groups for weight in group["params"]):
            return
        built = [[self._name_of.get(weight, "") for weight in group["params"]] for group in optimizer.param_groups]
        owners: dict[int, int] = {}
        chosen = []
        for number, group in enumerate(optimizer.param_groups):
            new = {id(weight): weight for weight in (self._flat_of.get(old, old) for old in group["params"])}
            chosen.append(list(new.values()))
            for flat in new:
                if owners.setdefault(flat, number) != number:
                    raise ValueError(
                        f"Parameters of groups {owners[flat]} and {number} of {type(optimizer).__name__} are joined "
                        "into one flat parameter, which can have the options of one group only. Pass "
                        "FullyShardedDataParallelPlugin(use_orig_params=True), or fsdp_version=2."
                    )
        if optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} has state for parameters that FSDP has joined into flat parameters. Pass "
                "FullyShardedDataParallelPlugin(use_orig_params=True), or create it after preparing the model."
            )
        for group, parameters in zip(optimizer.param_groups, chosen, strict=True):
            group["params"] = parameters
        self._built[optimizer] = built

    def built_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """Names of the parameters in each group, before they were replaced; None where they were not."""
        if optimizer in self._built:
            return self._built[optimizer]
        groups = [group["params"] for group in optimizer.param_groups]
        if not any(weight in self._names_in for group in groups for weight in group):
            return None
        return [[name for weight in group for name in self._names_in.get(weight, ())] for group in groups]


def flat_handles(wrapped: nn.Module) -> Iterator[tuple[str, Any]]:
    """The handles of flat parameters in a wrapped model.

    Args:
        wrapped: The model, with its wrappers; it may be compiled.

    Yields:
        The prefix of its parameters' names in the model as it was built, as `"layers.0."`, and the handle.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in getattr(wrapped, "_orig_mod", wrapped).named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield plain_name(f"{name}." if name else ""), module._handle
