"""Processes that work on the same batches read the same ones."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from accel_data.prepare import prepare_data_loader
from accel_state.processes import PartialState
from accelerate.test_utils import are_the_same_tensors
from tests.support.ranks import ranks


@ranks(2)
def test_processes_that_share_batches_shuffle_alike_whatever_they_drew(rank: int, world: int) -> None:
    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(rank)  # as after dropout in one of two stages
    loader = DataLoader(list(range(40)), batch_size=8, shuffle=True)
    prepared = prepare_data_loader(
        loader, num_processes=1, process_index=0, rng_types=["generator"], torch_device_mesh=mesh
    )
    for _ in range(2):
        for batch in prepared:
            assert are_the_same_tensors(batch)
