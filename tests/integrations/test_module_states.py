"""Models take the weights and buffers of the first rank, whatever their dtypes: backends know few."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.module_states import sync_module_states
from tests.support.ranks import ranks

DTYPES = [torch.int16, torch.uint16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.bfloat16]


@ranks(2)
def test_buffers_of_all_dtypes_come_from_the_first_rank(rank: int, world: int) -> None:
    module = nn.Linear(3, 2)
    expected = {}
    for dtype in DTYPES:
        name = str(dtype).replace("torch.", "of_")
        expected[name] = torch.tensor([0, 1, 1, 0]).to(dtype)
        module.register_buffer(name, expected[name].clone() if rank == 0 else torch.zeros(4).to(dtype))
    module.register_buffer("strided", torch.full((2, 3), float(rank)).t())
    module.register_buffer("count_of", torch.tensor(rank, dtype=torch.int16))
    module.register_buffer("empty", torch.empty(0))
    sync_module_states(module, [dist.group.WORLD])
    for name, values in expected.items():
        assert torch.equal(module.get_buffer(name).view(torch.uint8), values.view(torch.uint8)), name
    assert module.strided.eq(0).all()
    assert module.count_of == 0
    weights = [torch.empty(2, 3) for _ in range(world)]
    dist.all_gather(weights, module.weight.detach())
    assert torch.equal(weights[0], weights[1])
