"""What hosts tell each other when tensors are on an accelerator: real gloo ranks, with meta tensors as those of the device.

A meta tensor cannot be read, copied to the CPU or asked for a value, so whatever would make a host wait for its device
raises here. Collectives of the device are counted and give meta tensors; all else goes over the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_data.batch_scatter import BatchScatter
from accel_ops import broadcast_object_list, gather, gather_object, pad_across_processes, reduce
from accel_ops.collectives.packing import BUCKET_BYTES, LARGE_BYTES, buckets_of
from accel_ops.collectives.transport import TorchTransport, collective_device, host_group, new_host_group
from accel_state.errors import DistributedOperationException
from accel_state.interfaces import interface_to
from accel_state.processes import PartialState
from tests.support.ranks import ranks

DEVICE = torch.device("meta")


@contextmanager
def accelerators() -> Iterator[tuple[list[torch.Size], list[torch.Size]]]:
    """Let the device of all ranks be an accelerator.

    Yields the shapes of the buffers that its collectives got, and those of the all-gathers between hosts.
    """
    state = PartialState()
    known = (state.device, state.backend)
    state.device, state.backend = DEVICE, "pretended"
    sent: list[torch.Size] = []
    announced: list[torch.Size] = []
    real = (TorchTransport.all_gather, TorchTransport.all_reduce)

    def all_gather(self: Any, buffer: torch.Tensor, world: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if buffer.device != DEVICE:
            announced.append(buffer.shape)
            return real[0](self, buffer, world, out)
        sent.append(buffer.shape)
        return (buffer.new_empty(world * buffer.numel()) if out is None else out).view(world, buffer.numel())

    def all_reduce(self: Any, buffer: torch.Tensor, how: Any = "sum") -> torch.Tensor:
        assert buffer.device == DEVICE
        sent.append(buffer.shape)
        return buffer

    TorchTransport.all_gather, TorchTransport.all_reduce = all_gather, all_reduce  # type: ignore[method-assign]
    try:
        yield sent, announced
    finally:
        TorchTransport.all_gather, TorchTransport.all_reduce = real  # type: ignore[method-assign]
        state.device, state.backend = known


@ranks(2)
def test_no_host_waits_for_its_device(rank: int, world: int) -> None:
    with accelerators() as (sent, announced):
        loss = gather(
            {"loss": torch.empty((), device=DEVICE), "count": torch.empty((), dtype=torch.int64, device=DEVICE)}
        )
        assert loss["loss"].shape == loss["count"].shape == (2,)
        assert (len(sent), len(announced)) == (1, 0), "the sizes of 0-dim tensors are known"
        ragged = gather([torch.empty(3 + rank, 4, device=DEVICE), torch.empty(2, dtype=torch.int64, device=DEVICE)])
        assert [leaf.shape for leaf in ragged] == [(7, 4), (4,)], "sizes are learned from the other host"
        assert {leaf.device for leaf in ragged} == {DEVICE}
        padded = pad_across_processes(torch.empty(2, 3 + rank, device=DEVICE), dim=1)
        assert padded.shape == (2, 4)
        assert gather(padded).shape == (4, 4)
        many = gather([torch.empty(1 + rank, device=DEVICE) for _ in range(1500)])
        assert {leaf.shape for leaf in many} == {(3,)}
        assert reduce([torch.empty(5, device=DEVICE)], "sum")[0].shape == (5,)
        before = len(sent)
        assert gather(torch.tensor([rank])).tolist() == [0, 1], "tensors in CPU memory go between hosts"
        assert gather_object([rank]) == [0, 1]
        assert broadcast_object_list([f"from {rank}"], from_process=1) == ["from 1"]
        assert len(sent) == before
        different = torch.empty(2, 3 + rank, device=DEVICE)
        with pytest.raises(DistributedOperationException, match=r"rank 1: gather\(float32\[2, 4\]\)"):
            gather(different)
        assert len(sent) == before, "found out before any data were sent"


@ranks(2)
def test_a_dispatched_batch_reaches_the_device_in_one_copy(rank: int, world: int) -> None:
    with accelerators():
        scatter = BatchScatter(PartialState())
        if rank == 0:
            with scatter:
                for size in (2, 2, 3):
                    batches = [{"x": torch.full((size, 2), float(r)), "y": torch.arange(size)} for r in range(world)]
                    scatter.send(batches, is_last=size == 3, num_samples=size * world)
            return
        copies: list[torch.Size] = []
        to = torch.Tensor.to

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            copies.append(tensor.shape)
            return to(tensor, *args, **kwargs)

        torch.Tensor.to = counted  # type: ignore[method-assign, assignment]
        try:
            received = [scatter.receive() for _ in range(3)]
        finally:
            torch.Tensor.to = to  # type: ignore[method-assign]
        assert [one.batch["x"].shape for one in received if one] == [(2, 2), (2, 2), (3, 2)]
        assert {one.batch["y"].device for one in received if one} == {DEVICE}
        assert [one.is_last for one in received if one] == [False, False, True]
        assert len(copies) == 3, "one copy per batch"


@ranks(3)
def test_a_group_beside_another_has_its_ranks_and_its_timeout(rank: int, world: int) -> None:
    world_group = dist.group.WORLD
    assert world_group is not None
    assert host_group() is world_group, "gloo takes tensors in CPU memory itself"
    pair = dist.new_group([0, 2], timeout=timedelta(hours=2))
    beside = new_host_group(world_group)
    of_pair = None if rank == 1 else new_host_group(pair)  # only its ranks take part
    total = torch.tensor([rank])
    dist.all_reduce(total, group=beside)
    assert total.item() == 3
    if of_pair is not None:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=of_pair)
        assert total.item() == 2
        assert of_pair._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=2)


@ranks(2)
def test_the_device_of_collectives_is_that_of_the_run_not_of_the_machine(rank: int, world: int) -> None:
    known, asked = dist.get_backend, torch.accelerator.current_accelerator
    dist.get_backend = lambda group=None: "cpu:gloo"  # type: ignore[assignment] # a user's choice, with cpu=True
    torch.accelerator.current_accelerator = lambda *args: torch.device("cuda")  # type: ignore[assignment]
    try:
        assert collective_device(dist.group.WORLD).type == "cpu"
    finally:
        dist.get_backend, torch.accelerator.current_accelerator = known, asked


def test_the_interface_to_rank_0_is_that_of_the_route() -> None:
    assert interface_to(None) is None
    assert interface_to("127.0.0.1") is None, "this machine"
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    default = [fields[0] for fields in routes if fields[1] == "00000000"]
    if default:
        assert interface_to("192.0.2.1") == default[0]


def test_buckets_hold_large_leaves_alone_and_never_more_than_their_size() -> None:
    large = (torch.float32, (LARGE_BYTES // 4,))
    small = (torch.float32, (LARGE_BYTES // 4 - 1,))
    signature = (small, large, *[small] * 70, large)
    buckets = buckets_of(signature)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(signature)))
    assert (1,) in buckets
    assert (len(signature) - 1,) in buckets
    for bucket in buckets:
        if len(bucket) > 1:
            assert sum(4 * signature[index][1][0] for index in bucket) <= BUCKET_BYTES
    assert buckets_of(()) == ()
