"""Parallelism degrees, the process groups of megatron-core, and the random seeds that belong to them."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_integrations.megatron.core import load
from accel_ops.collectives.store_exchange import exchange_outcomes
from accel_state.mesh_axes import DataShard

if TYPE_CHECKING:
    from accel_state.settings.megatron import MegatronLMPlugin

WHOLE_SEQUENCES = (
    "custom_train_step_class", "custom_loss_function", "custom_get_batch_function", "custom_model_provider_function",
)  # fmt: skip
"""Fields of `MegatronLMPlugin` whose functions get sequences as the program passes them, or attention without our own."""
_made_on: weakref.ref[Any] | None = None  # the process group from which those of megatron-core were made


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees of parallelism of a run.

    Args:
        tensor: Tensor parallel size.
        pipeline: Pipeline stages.
        data: Replicas, which read different data.
        expert: Expert parallel size: ranks of a pipeline stage over which the experts of a mixture are distributed.
        context: Context parallel size.
        expert_tensor: Tensor parallel size of each expert.
    """

    tensor: int
    pipeline: int
    data: int
    expert: int = 1
    context: int = 1
    expert_tensor: int = 1

    @classmethod
    def of(cls, plugin: MegatronLMPlugin, world: int) -> Degrees:
        """The degrees of a run.

        Args:
            plugin: Has all but the number of replicas.
            world: The number of ranks.

        Raises:
            ValueError: The world size is not divisible by tp x pp x cp, or a pipeline stage not by the experts' sizes.
            NotImplementedError: For functions of the program with context parallelism.
        """
        tensor, pipeline, expert = plugin.tp_degree, plugin.pp_degree, plugin.expert_model_parallel_size
        context = plugin.context_parallel_size
        hook_names = [name for name in WHOLE_SEQUENCES if getattr(plugin, name) is not None]
        if context > 1 and hook_names:
            raise NotImplementedError(
                f"MegatronLMPlugin.{hook_names[0]} with context_parallel_size={context} is not supported: each rank computes some "
                "tokens of every sequence, which that function knows nothing of. Leave one of them out."
            )
        of_replica = tensor * pipeline * context
        if world % of_replica:
            factors = _product(tp_degree=tensor, pp_degree=pipeline, context_parallel_size=context)
            raise ValueError(
                f"{factors} does not divide the {world} processes of this run. Start a multiple of {of_replica} "
                "processes, or choose smaller degrees."
            )
        expert_tensor = plugin.expert_tensor_parallel_size
        if (world // pipeline) % (expert * expert_tensor):
            factors = _product(expert_model_parallel_size=expert, expert_tensor_parallel_size=expert_tensor)
            raise ValueError(
                f"{factors} does not divide the {world // pipeline} processes of each pipeline stage ({world} processes / "
                f"pp_degree={pipeline}). Choose sizes that do."
            )
        return cls(tensor, pipeline, world // of_replica, expert, context, expert_tensor)

    def sizes(self) -> dict[str, int]:
        """All but the replicas, by the names of megatron-core's `initialize_model_parallel`."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
        }


def make_groups(degrees: Degrees) -> None:
    """Make the process groups of megatron-core, or use those that exist already.

    Raises:
        ValueError: The program has made groups of other degrees.
    """
    global _made_on
    parallel = load("parallel_state")
    world: Any = dist.group.WORLD
    expected = degrees.sizes()
    if parallel.model_parallel_is_initialized():
        sizes = _sizes(parallel)
        is_ours = _made_on is not None
        is_alive = _made_on is None or _made_on() is world
        if not is_ours:
            del sizes["expert_tensor_parallel_size"]  # that of tensors unless given, and only experts care
        others = [f"{name}={size}, not {expected[name]}" for name, size in sizes.items() if size != expected[name]]
        if is_alive and not others:
            return
        if not is_ours:
            raise ValueError(
                f"The program has initialized megatron-core with {', '.join(others)} as MegatronLMPlugin says. Use the same "
                "sizes."
            )
        parallel.destroy_model_parallel()  # of other degrees, or of a process group that is gone
    parallel.initialize_model_parallel(**expected, create_gloo_process_groups=False)
    _made_on = weakref.ref(world)


def check_for_experts(degrees: Degrees, plugin: MegatronLMPlugin) -> None:
    """Check that a mixture of experts can be trained so.

    Args:
        degrees: The parallelism degrees, for which groups were made.
        plugin: The settings of the run.

    Raises:
        ValueError: Tensor-parallel ranks would send the same tokens to the experts or not sum their gradients, or the
            program's groups shard experts otherwise.
    """
    if degrees.tensor > 1 and not plugin.sequence_parallelism:
        raise ValueError(
            f"tp_degree={degrees.tensor} with a mixture of experts needs sequence_parallelism=True: ranks send their own "
            "tokens to the experts. Set it."
        )
    if degrees.tensor > 1 and plugin.custom_prepare_model_function is not None:
        raise ValueError(
            f"custom_prepare_model_function with tp_degree={degrees.tensor} and a mixture of experts would not sum the gradients "
            "of experts over tensor-parallel ranks. Leave it out, or set tp_degree to 1."
        )
    size = load("parallel_state").get_expert_tensor_parallel_world_size()
    if size != degrees.expert_tensor:
        raise ValueError(
            f"The program has initialized megatron-core with expert_tensor_parallel_size={size}, not {degrees.expert_tensor} as "
            "MegatronLMPlugin says. Use the same size."
        )


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise what went wrong on any rank on all of them, so that none waits for the others; all ranks call this.

    Args:
        error: What went wrong on this rank; None for nothing.

    Raises:
        Exception: It, if there is one.
        ValueError: Another rank had one.
    """
    problems = exchange_outcomes("" if error is None else str(error))
    if error is not None:
        raise error
    for rank, text in enumerate(problems):
        if text:
            raise ValueError(f"Rank {rank}: {text}")


def drop_groups() -> None:
    """Forget the process groups that `make_groups` made."""
    global _made_on
    if _made_on is not None:
        load("parallel_state").destroy_model_parallel()
        _made_on = None


def _sizes(parallel: Any) -> dict[str, int]:
    """The sizes of the groups that exist, by the same names as `Degrees.sizes`."""
    return {
        "tensor_model_parallel_size": parallel.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel.get_expert_tensor_parallel_world_size(),
    }


def _product(**sizes: int) -> str:
    """Sizes that are not 1, as factors of their product."""
    factors = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    return f"{factors} = {math.prod(sizes.values())}" if " x " in factors else factors


def data_shard() -> DataShard:
    """The slice of the data that this rank reads: ranks of one replica read the same."""
    parallel = load("parallel_state")
    return DataShard(parallel.get_data_parallel_rank(), parallel.get_data_parallel_world_size())


def start_random_numbers(device: torch.device) -> None:
    """Make ranks that hold shards of one layer draw the same numbers for what they all compute.

    On the CPU they go on from one state of torch's generator; on CUDA megatron-core keeps a second state for sharded
    activations.
    """
    parallel, random = load("parallel_state"), load("tensor_parallel.random")
    group = parallel.get_tensor_model_parallel_group()
    first = dist.get_global_rank(group, 0)
    if device.type == "cpu":
        random.initialize_rng_tracker(inference_rng_tracker=True)
        state = torch.get_rng_state()
        dist.broadcast(state, first, group=group)
        torch.set_rng_state(state)
        return
    seed = torch.tensor([torch.initial_seed() % 2**31], device=device)
    dist.broadcast(seed, first, group=group)
    random.model_parallel_cuda_manual_seed(int(seed) + 100 * parallel.get_pipeline_model_parallel_rank())
