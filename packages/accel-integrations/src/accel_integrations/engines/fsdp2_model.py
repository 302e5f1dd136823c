"""A model whose parameters, gradients and optimizer state are divided between processes, by `fully_shard`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_integrations.engines.activation_checkpoint import checkpoint_blocks
from accel_integrations.engines.wrap_policy import find_blocks, resolve_policy
from accel_integrations.parallel.module_states import check_module_states, sync_module_states
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
        mesh: One dimension that divides parameters; or two, of which the first one has copies of these divisions.
        device: Where this process computes.
    """

    plugin: FullyShardedDataParallelPlugin
    mesh: DeviceMesh
    device: torch.device

    def shard(self, model: nn.Module) -> nn.Module:
        """Divide a model in place: its blocks one by one, and what is left as the last.

        All processes get the values of the first; a process that holds only shapes never holds more than one block.

        Raises:
            ValueError: When a class to wrap does not occur in the model, or the first process has no values.
        """
        from torch.distributed.fsdp import fully_shard

        policy = resolve_policy(self.plugin, model)
        check_module_states(model, self._groups)
        blocks: Sequence[nn.Module] = find_blocks(model, policy)
        if self.plugin.activation_checkpointing:
            blocks = self._checkpoint(model, blocks)
        ignored = get_parameters_from_modules(self.plugin.ignored_modules, model, self.device)
        across = _parameters_across(model, blocks)  # the whole model is their smallest block
        for module in [*blocks, model]:
            is_root = module is model
            left_out = ignored if is_root else ignored | across
            sync_module_states(module, self._groups, self.device, () if is_root else left_out)
            fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=bool(self.plugin.reshard_after_forward),
                mp_policy=self._precision_policy(is_root),
                offload_policy=self._offload_policy(),
                ignored_params=left_out,
            )
        return model

    def shard_each(self, modules: Sequence[nn.Module]) -> None:
        """Divide modules in place, each by itself: parts of a model of which this process does not have the whole.

        Args:
            modules: With equal values on all processes of the mesh.
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
                f"activation_checkpointing=True has no effect on {type(model).__name__}, in which no blocks are "
                "wrapped: choose an auto_wrap_policy."
            )
            return blocks
        return checkpoint_blocks(model, blocks, offload=self.plugin.activation_checkpointing_offload)

    def _precision_policy(self, is_root: bool) -> Any:
        """Blocks hand on what they computed; only the whole model's outputs are converted."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy: Any = self.plugin.mixed_precision_policy
        if policy is None:
            return MixedPrecisionPolicy()
        output = policy.output_dtype if is_root else None
        if is_root and self.plugin.precision_from_run:
            output = torch.float32  # as with every other training engine
        return dataclasses.replace(policy, output_dtype=output)

    def _offload_policy(self) -> Any:
        """As given, but memory can be pinned only for an accelerator."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        policy = self.plugin.cpu_offload
        if isinstance(policy, CPUOffloadPolicy) and not torch.accelerator.is_available():
            return CPUOffloadPolicy(pin_memory=False)
        return policy


def sharding_mesh(config: ParallelismConfig | None, device_type: str) -> DeviceMesh | None:
    """The mesh over which parameters are divided.

    Args:
        config: The axes in use; None for all processes in one.
        device_type: For example "cuda" or "cpu".

    Returns:
        One or two dimensions, as for `fully_shard`; None where processes share nothing along them.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if config is None or config.total_size == 1:
        return init_device_mesh(device_type, (torch.distributed.get_world_size(),), mesh_dim_names=("dp_shard",))
    mesh = config.get_device_mesh(device_type)
    members = config.dp_shard_cp_dim_names
    if mesh is None or not members:
        return None
    if not config.dp_replicate_enabled:
        return mesh[members[0]] if len(members) == 1 else config.axis_mesh("dp_shard_cp")
    if len(members) == 1:
        return mesh["dp_replicate", members[0]]
    return mesh["dp_replicate", "dp_shard_cp"]


def upcast_trainable(model: nn.Module) -> None:
    """Keep what is learnt in float32, so that small updates are not lost to a 16-bit format.

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
        f"{len(low)} parameters of {type(model).__name__} that are trainable ({low[0][0]}, ...) were in 16-bit formats and are "
        "kept in float32 now, because mixed_precision computes in 16 bits itself. Load the model in float32 to say so."
    )


def _parameters_across(model: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Tied parameters that some block shares with modules outside of it."""
    num_names = {parameter: len(names) for parameter, names in names_by_parameter(model).items()}
    across = set()
    for block in blocks:
        across |= {one for one, inside in names_by_parameter(block).items() if len(inside) < num_names[one]}
    return across
