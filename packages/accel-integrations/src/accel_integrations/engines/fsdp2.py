"""Sharded training, version 2: `fully_shard` turns parameters into DTensors, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.engines.engine import Engine, EngineContext
from accel_integrations.engines.placing import move_model, move_plain_tensors
from accel_integrations.engines.sharded_engines import (
    check_mesh,
    checkpoint_blocks,
    find_blocks,
    num_averaged,
    resolve_policy,
    warn_no_join,
)
from accel_integrations.parallel.module_states import check_module_states, sync_module_states
from accel_integrations.parallel.replicas import GradientAverager
from accel_integrations.parallel.tensor import added_after_fsdp
from accel_integrations.prepared.prepared import Notes
from accel_integrations.training_state.formats.forms import full_model_state, model_state
from accel_ops.modules import get_parameters_from_modules
from accel_ops.tied import names_by_parameter
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig
    from accel_state.settings.fsdp import FullyShardedDataParallelPlugin


@dataclass(frozen=True)
class Sharding:
    """How models of a run are sharded.

    Attributes:
        plugin: The settings.
        mesh: One dimension along which parameters are sharded; or two, replicas by shards.
        device: The device of this rank.
    """

    plugin: FullyShardedDataParallelPlugin
    mesh: DeviceMesh
    device: torch.device

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model in place: block by block, then the remaining parameters.

        Parameters are broadcast from rank 0 block by block, so a rank whose model is on the meta device never holds
        more than one unsharded block.

        Raises:
            ValueError: When a class to wrap does not occur in the model, or the model of rank 0 is on the meta device.
        """
        from torch.distributed.fsdp import fully_shard

        policy = resolve_policy(self.plugin, model)
        check_module_states(model, self._groups)
        blocks: Sequence[nn.Module] = find_blocks(model, policy)
        if self.plugin.activation_checkpointing:
            blocks = self._checkpoint(model, blocks)
        ignored = get_parameters_from_modules(self.plugin.ignored_modules, model, self.device)
        across = _parameters_tied_across(model, blocks)  # only the root module contains all their uses
        # Blocks come before the root: `fully_shard` gives each module the parameters that no module inside it has
        # taken.
        for module in [*blocks, model]:
            is_root = module is model
            left_out = ignored if is_root else ignored | across
            unsynced = () if is_root else left_out
            move_plain_tensors(module, self.device, unsynced)  # once, for the broadcast and for `fully_shard`
            sync_module_states(module, self._groups, self.device, unsynced)
            # Noted now, because `fully_shard` replaces the parameters of the module by shards.
            unsharded = list(module.parameters())
            fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=bool(self.plugin.reshard_after_forward),
                mp_policy=self._precision_policy(is_root),
                offload_policy=self._offload_policy(),
                ignored_params=left_out,
            )
            _release_replaced(unsharded, module)
        return model

    def shard_each(self, modules: Sequence[nn.Module]) -> None:
        """Shard modules in place, each by itself: those of a model of which this rank holds only some stages.

        Args:
            modules: With equal parameters on all ranks of the mesh.
        """
        from torch.distributed.fsdp import fully_shard

        for module in modules:
            fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=bool(self.plugin.reshard_after_forward),
                mp_policy=self._precision_policy(is_root=False),
                offload_policy=self._offload_policy(),
            )

    @property
    def _groups(self) -> list[Any]:
        return [self.mesh.get_group(dim) for dim in range(self.mesh.ndim)]

    def _checkpoint(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        if not blocks:
            warn_user(
                f"activation_checkpointing=True has no effect on {type(model).__name__}, because none of its modules "
                "is wrapped. Choose an auto_wrap_policy."
            )
            return blocks
        return checkpoint_blocks(model, blocks, offload=self.plugin.activation_checkpointing_offload)

    def _precision_policy(self, is_root: bool) -> Any:
        """Outputs of blocks keep their dtype; only those of the root module are converted."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy: Any = self.plugin.mixed_precision_policy
        if policy is None:
            return MixedPrecisionPolicy()
        output = policy.output_dtype if is_root else None
        if is_root and self.plugin.precision_from_run:
            output = torch.float32  # as with every other engine
        return dataclasses.replace(policy, output_dtype=output)

    def _offload_policy(self) -> Any:
        """As the plugin says; without an accelerator, CPU memory cannot be pinned."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        policy = self.plugin.cpu_offload
        if isinstance(policy, CPUOffloadPolicy) and not torch.accelerator.is_available():
            return CPUOffloadPolicy(pin_memory=False)
        return policy


def _release_replaced(parameters: Sequence[nn.Parameter], module: nn.Module) -> None:
    """Release the memory of parameters that a module no longer has, because its shards took their place.

    An optimizer that was made for them keeps them until it is rebound: together, a whole model on each device. They
    keep their shapes, which programs may have noted and count.
    """
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    for parameter in parameters:
        if id(parameter) not in parameter_ids:
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


def sharding_mesh(config: ParallelismConfig | None, device_type: str) -> DeviceMesh:
    """The mesh over which parameters are sharded: one or two dimensions, as for `fully_shard`.

    Args:
        config: The sizes of the mesh dimensions, of which one shards parameters; None for one dimension of all ranks.
        device_type: For example "cuda" or "cpu".
    """
    from torch.distributed.device_mesh import init_device_mesh

    if config is None or config.total_size == 1:
        return init_device_mesh(device_type, (torch.distributed.get_world_size(),), mesh_dim_names=("dp_shard",))
    mesh = config.get_device_mesh(device_type)
    members = config.dp_shard_cp_dim_names
    assert mesh is not None
    assert members, "engines check the mesh before"
    if not config.dp_replicate_enabled:
        joined = mesh[members[0]] if len(members) == 1 else config.axis_mesh("dp_shard_cp")
        assert joined is not None
        return joined
    if len(members) == 1:
        return mesh["dp_replicate", members[0]]
    return mesh["dp_replicate", "dp_shard_cp"]


def upcast_trainable(model: nn.Module) -> None:
    """Upcast trainable parameters to float32, so that small updates are not rounded away.

    Args:
        model: The model, changed in place.
    """
    low = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16)
    ]
    if not low:
        return
    for _, parameter in low:
        parameter.data = parameter.data.float()
    warn_user(
        f"{len(low)} trainable parameters of {type(model).__name__} ({low[0][0]}, ...) had a 16-bit dtype and were "
        "upcast to float32, because mixed_precision casts to 16 bits in the forward pass itself. Load the model in "
        "float32 to avoid this warning."
    )


def _parameters_tied_across(model: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Tied parameters that a block shares with modules outside of it."""
    num_names = {parameter: len(names) for parameter, names in names_by_parameter(model).items()}
    across = set()
    for block in blocks:
        across |= {one for one, inside in names_by_parameter(block).items() if len(inside) < num_names[one]}
    return across


@final
class FSDP2Engine(Engine):
    """`torch.distributed.fsdp.fully_shard`, over all ranks or over the sharding dimensions of the mesh."""

    name = "fsdp2"
    compiles_in_place = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._averagers: Notes[nn.Module, GradientAverager] = Notes()

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
        """Shard the model, also for evaluation: it may be too large for one device.

        What was added to a model that arrives sharded, such as adapters, is a replica: its gradients are averaged.
        """
        if is_sharded(model) or not any(True for _ in model.parameters()):
            model = move_model(model, self.context.state.device) if device_placement else model
            if not evaluation and self.num_averaged > 1 and (added := added_after_fsdp(model)):
                self._averagers[model] = GradientAverager(model, self.averaging_group, added)
            return model
        if self.context.state.mixed_precision != "no":
            upcast_trainable(model)
        return self.sharding.shard(model)

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do not reduce-scatter gradients in backward: each rank keeps its own unsharded gradients."""
        if not hasattr(model, "set_requires_gradient_sync"):
            return nullcontext()
        return _without_sync(model, self._averagers.get(self.unwrap(model)))

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
def _without_sync(model: Any, averager: GradientAverager | None) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        with nullcontext() if averager is None else averager.no_sync():
            yield
    finally:
        model.set_requires_gradient_sync(True)
