"""Sizes of the buffers in which objects are sent, on devices that compile collectives for each size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from accel_ops.collectives import objects
from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_state.devices import device_kind
from accel_state.processes import PartialState
from tests.support.ranks import ranks


@pytest.mark.parametrize(
    ("num_bytes", "sent"), [(1, 2**20), (2**20, 2**20), (2**20 + 1, 2**21), (3 * 2**20, 2**22), (2**22, 2**22)]
)
def test_few_sizes_are_compiled(num_bytes: int, sent: int) -> None:
    neuron, other = (cast(torch.device, SimpleNamespace(type=name)) for name in ("neuron", "cuda"))
    assert objects._buffer_size(num_bytes, neuron) == sent
    assert objects._buffer_size(num_bytes, other) == num_bytes


@ranks(2)
def test_objects_arrive_in_larger_buffers(rank: int, world: int) -> None:
    PartialState()
    sizes: set[int] = set()

    class Noted:
        """The transport of this run, which notes the sizes of its buffers."""

        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def between_hosts(self, state: PartialState) -> Any:
            """This one, as where gloo cannot be had."""
            return self

        def __getattr__(self, name: str) -> Any:
            function = getattr(self._transport, name)
            if name not in ("all_gather", "broadcast"):
                return function

            def noted(buffer: Any, *args: Any, **options: Any) -> Any:
                sizes.add(len(buffer))
                return function(buffer, *args, **options)

            return noted

    with pytest.MonkeyPatch.context() as patch:
        transport_of = objects.transport_of
        patch.setattr(objects, "transport_of", lambda state: Noted(transport_of(state)))
        patch.setattr(objects, "kind_of", lambda device: device_kind("neuron"))
        for length in (10_000, 30_000):
            texts = ["a" * length, "b" * (length + 1)]
            assert gather_object([texts[rank]]) == texts
            assert broadcast_object_list([texts[1] if rank == 1 else None], from_process=1) == texts[1:]
    assert {size for size in sizes if size > 9000} == {2**20}
