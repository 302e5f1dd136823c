"""Checks of collectives."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.state import PartialState
from accelerate.test_utils.scripts.checks.check import Process, checks, make_accelerator, same
from accelerate.utils import broadcast, broadcast_object_list, gather_object


def everyone_is_there(process: Process) -> None:
    """Ranks are 0, 1, 2, ..., and processes of one machine have a device each, where there are any."""
    state = PartialState()
    seen = gather_object([(state.process_index, state.is_main_process, state.local_process_index, str(state.device))])
    same([rank for rank, *_ in seen], list(range(process.world)), "the ranks")
    same([rank for rank, is_main, *_ in seen if is_main], [0], "main processes")
    state.wait_for_everyone()


def gathering(process: Process) -> None:
    """`gather` concatenates tensors in rank order, also in nested structures."""
    accelerator = make_accelerator()
    tensor = torch.full((2, 3), float(process.rank), device=accelerator.device)
    tensors: dict[str, Any] = {"a": tensor, "b": [tensor.long()]}
    gathered = accelerator.gather(tensors)
    ranks = torch.arange(process.world).repeat_interleave(2)
    same(gathered["a"].shape, torch.Size([2 * process.world, 3]), "shape")
    same(gathered["a"][:, 0].tolist(), ranks.tolist(), "ranks of the rows")
    same(gathered["b"][0][:, 2].tolist(), ranks.tolist(), "ranks of the rows")


def gathering_objects(process: Process) -> None:
    """`gather_object` gathers any objects; each process may have another number of them."""
    objects = gather_object([{"rank": process.rank, "text": "é" * count} for count in range(process.rank + 1)])
    expected = [{"rank": rank, "text": "é" * count} for rank in range(process.world) for count in range(rank + 1)]
    same(objects, expected, "objects")


def reducing(process: Process) -> None:
    """`reduce` gives the sum and mean over all processes."""
    accelerator = make_accelerator()
    tensor = torch.arange(4.0, device=accelerator.device) + process.rank
    total = torch.arange(4.0) * process.world + sum(range(process.world))
    same(accelerator.reduce(tensor.clone(), "sum").tolist(), total.tolist(), "sum")
    mean = accelerator.reduce(tensor.clone(), "mean").cpu()
    torch.testing.assert_close(mean, total / process.world, msg=lambda text: f"mean: {text}")


def broadcasting(process: Process) -> None:
    """`broadcast` sends tensors of the first and of the last rank to all."""
    device = PartialState().device
    for source in {0, process.world - 1}:
        tensor = torch.full((3,), float(process.rank), device=device)
        same(broadcast(tensor, from_process=source).tolist(), [float(source)] * 3, f"tensor of rank {source}")


def broadcasting_objects(process: Process) -> None:
    """`broadcast_object_list` sends objects of rank 0 to all."""
    objects = broadcast_object_list([process.rank, {"rank": process.rank}], from_process=0)
    same(list(objects), [0, {"rank": 0}], "objects of rank 0")


def padding(process: Process) -> None:
    """`pad_across_processes` pads tensors to the longest, at either end."""
    accelerator = make_accelerator()
    tensor = torch.ones(process.rank + 1, 2, device=accelerator.device)
    for first in (False, True):
        padded = accelerator.pad_across_processes(tensor, dim=0, pad_index=-1, pad_first=first)
        missing = [-1.0] * (process.world - process.rank - 1)
        ones = [1.0] * (process.rank + 1)
        same(padded[:, 0].tolist(), missing + ones if first else ones + missing, f"padded, pad_first={first}")


COLLECTIVES = checks(
    "collectives",
    everyone_is_there=everyone_is_there,
    gather=gathering,
    gather_objects=gathering_objects,
    reduce=reducing,
    broadcast=broadcasting,
    broadcast_objects=broadcasting_objects,
    pad=padding,
)
