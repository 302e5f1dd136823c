"""Expert parallelism: each rank of a TP group holds some experts, unsharded, and tokens are sent to their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from typing_extensions import override

from accel_integrations.parallel.module_states import sync_module_states, sync_random_state
from accel_integrations.parallel.transform import Transform
from accel_integrations.parallel.transformers_plan import brings_own_styles, expert_plan, shard_experts
from accel_ops.modules import model_has_dtensor

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig


@final
class ExpertParallel(Transform):
    """Distributes the experts of a transformers model with an expert plan over the ranks."""

    axis = "tp"

    @classmethod
    @override
    def is_wanted(cls, config: ParallelismConfig) -> bool:
        """Whether `TorchTensorParallelConfig(expert_parallel=True)` asks for it."""
        return config.tp_size > 1 and config.tp_handler is not None and config.tp_handler.expert_parallel

    @override
    def check(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Check that the model has a plan for its experts, and that these can be distributed evenly.

        Raises:
            ValueError: It does not fit; the message says why, and what would be accepted.
        """
        size = mesh[self.axis].size()
        if model_has_dtensor(model):
            return  # transformers has sharded it
        if not brings_own_styles(model) or not getattr(model, "ep_plan", None):
            raise ValueError(
                f"expert_parallel=True needs a model with experts and a plan for them, but {type(model).__name__} has "
                "none. Use a mixture-of-experts model of transformers >= 5.20 that has an `ep_plan`, or leave "
                "expert_parallel out, so that tensor parallelism shards every expert."
            )
        modules = dict(model.named_modules())
        experts = [
            (name, count)
            for name in expert_plan(model, size)
            if (count := getattr(modules.get(name), "num_experts", None)) and count % size
        ]
        if experts:
            name, count = experts[0]
            raise ValueError(
                f"tp_size={size} does not divide the {count} experts of {name}. Choose a tp_size that does, or leave "
                "expert_parallel out."
            )

    @override
    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Distribute the experts over the ranks, in place."""
        if not model_has_dtensor(model):
            sync_module_states(model, [mesh[self.axis].get_group()])
            sync_random_state(mesh[self.axis])
            shard_experts(model, mesh[self.axis])
        return model
