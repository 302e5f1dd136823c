"""Models with DTensors keep them where they are when they are prepared; what is plain moves to the device."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accel_integrations.engines.placing import move_model
from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accelerate import Accelerator
from tests.support.ranks import ranks


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(inputs))


@ranks(2)
def test_models_with_dtensors_are_prepared_without_moving_them(rank: int, world: int) -> None:
    torch.manual_seed(0)
    sharded = fully_shard(Normed())
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert accelerator.prepare(sharded, optimizer)[0] is sharded  # the references to its parameters are weak
    accelerator.backward(sharded(torch.ones(2, 4)).sum())
    accelerator.free_memory()

    mesh = init_device_mesh("cpu", (world,))
    model, other = Normed(), Normed()
    other.norm.running_mean = model.norm.running_mean
    model.layer.weight = nn.Parameter(distribute_tensor(model.layer.weight.data, mesh, [Shard(0)]))
    both = nn.ModuleList([model, other])
    weight = model.layer.weight
    model.layer.bias.grad = torch.ones(4)
    move_model(both, torch.device("meta"))  # the only other device that is here
    assert model.layer.weight is weight
    assert isinstance(weight, DTensor)
    assert weight.device.type == "cpu"
    assert model.layer.bias.is_meta
    assert model.layer.bias.grad is not None
    assert model.layer.bias.grad.is_meta
    assert all(buffer.is_meta for buffer in both.buffers())
    assert model.norm.running_mean is other.norm.running_mean


@ranks(2)
def test_a_model_that_was_sharded_before_trains_under_tensor_parallelism(rank: int, world: int) -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    mesh = accelerator.torch_device_mesh
    assert mesh is not None
    model = Normed()
    for name in ("weight", "bias"):
        value = getattr(model.layer, name).data
        setattr(model.layer, name, nn.Parameter(distribute_tensor(value, mesh["tp"], [Shard(0)])))
    buffer = model.norm.running_mean
    assert buffer is not None
    model.norm.register_buffer("running_mean", buffer.to("meta"))
    accelerator.state.device = torch.device("meta")
    weight = model.layer.weight
    assert accelerator.prepare(model).layer.weight is weight
