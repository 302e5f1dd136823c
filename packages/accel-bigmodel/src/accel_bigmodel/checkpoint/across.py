"""Loading into models that several processes share."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from accel_bigmodel.checkpoint.compare import compare
from accel_bigmodel.checkpoint.contents import CheckpointContents
from accel_bigmodel.checkpoint.index import find_checkpoint

FLAT = "FullyShardedDataParallel"  # whose parameters have names and shapes of their own


def is_sharded(model: nn.Module) -> bool:
    """Whether processes hold parts of its parameters each."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters()) or _is_flat(model)


def load_across_processes(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Load a checkpoint into a model on all processes, each its own part.

    Args:
        model: The model, on all processes.
        checkpoint: As for `load_checkpoint_in_model`; read by rank 0 only where that broadcasts.
        dtype: Of floating-point tensors; None leaves them as stored.
        strict: Names have to be the same.
        full_state_dict: The checkpoint holds whole tensors, not one process's parts.
        broadcast_from_rank0: Rank 0 reads, and broadcasts to the others.

    Raises:
        RuntimeError: On all processes, when the one that reads cannot, or without a process group.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if broadcast_from_rank0 and not dist.is_initialized():
        raise RuntimeError(
            "broadcast_from_rank0=True needs a process group: start the program with `accelerate launch` and make an "
            "Accelerator or PartialState first, or leave it out."
        )
    state_dict: dict[str, torch.Tensor] = {}
    problem: Exception | None = None
    if not broadcast_from_rank0 or dist.get_rank() == 0:
        try:
            state_dict = _read(model, checkpoint, dtype, strict)
        except Exception as error:
            problem = error
    if broadcast_from_rank0:
        reasons = [None if problem is None else f"{type(problem).__name__}: {problem}"]
        dist.broadcast_object_list(reasons, src=0)
        if problem is None and reasons[0] is not None:
            raise RuntimeError(f"Rank 0 could not load the checkpoint: {reasons[0]}")
    if problem is not None:
        raise problem
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    set_model_state_dict(model, state_dict, options=options)  # type: ignore[arg-type]


def _read(
    model: nn.Module, checkpoint: str | os.PathLike[str], dtype: torch.dtype | None, strict: bool
) -> dict[str, torch.Tensor]:
    contents = CheckpointContents(find_checkpoint(checkpoint))
    if not _is_flat(model):
        compare(model, contents).judge(strict)
    return {name: convert(contents.tensor(name), dtype) for name in contents}


def convert(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in another dtype, if it is one of floating-point numbers."""
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def _is_flat(model: nn.Module) -> bool:
    return any(type(module).__name__ == FLAT for module in model.modules())


__all__ = ["convert", "is_sharded", "load_across_processes"]
