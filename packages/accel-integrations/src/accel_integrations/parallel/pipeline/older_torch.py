"""What the pipelines of torch 2.9 do otherwise than later ones; from 2.10 on nothing here changes anything."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.pipelining import ScheduleGPipe


def match_dtypes(stage: Any) -> Any:
    """Let a stage send its first tensors in the dtype in which the other stages receive them.

    Torch 2.9 sends int64 and receives float32, which ends both processes when the backend is gloo.

    Args:
        stage: A `torch.distributed.pipelining.PipelineStage`.

    Returns:
        The same stage.
    """
    first_operations = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if first_operations is None:  # later versions have none
        return stage

    def of_one_dtype() -> list[dist.P2POp]:
        operations: list[dist.P2POp] = first_operations()
        for operation in operations:
            operation.tensor = operation.tensor.float()
        return operations

    stage._get_init_p2p_neighbors_ops = of_one_dtype
    return stage


def without_outputs(schedule: Any) -> Any:
    """The same schedule, whose `step` no longer joins the outputs of micro-batches; torch 2.9 has no option for that."""
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        schedule.step = functools.partial(schedule.step, return_outputs=False)
    else:
        schedule._merge_outputs = lambda outputs: None
    return schedule


def gpipe(stage: Any, num_microbatches: int) -> ScheduleGPipe:
    """A GPipe schedule of a traced stage, which may have others and fewer micro-batches than there are stages.

    Torch 2.9 raises for either.
    """
    from torch.distributed.pipelining import ScheduleGPipe

    if hasattr(stage, "_outputs_meta"):
        stage._outputs_meta = None  # every schedule would set it anew
    try:
        return ScheduleGPipe(stage, num_microbatches)
    except ValueError:
        if num_microbatches >= stage.num_stages:
            raise
    schedule = ScheduleGPipe(stage, stage.num_stages)
    schedule._n_microbatches = num_microbatches
    return schedule
