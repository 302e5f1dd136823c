"""Averaging and clipping gradients waits for no device, and takes few collectives: counted, on devices that are names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_integrations.parallel import replicas
from accel_integrations.parallel.replicas import GradientAverager
from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_loader, make_model, shift, token_loss


class Partly(nn.Module):
    """`some` is used where it is asked for, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some, self.never = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, uses_some: bool) -> torch.Tensor:
        total = self.always.sum()
        return total + self.some.sum() if uses_some else total


@pytest.mark.skipif(torch.__version__.startswith("2.9"), reason="fake tensors of torch 2.9 ask the driver for devices")
def test_averages_of_gradients_that_are_all_there_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock: the all-reduce of GPUs, whose tensors have no values here and raise an error when they are read."""
    made: list[Any] = []
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *values, **options: made.append(values) or tensor(*values, **options))
    monkeypatch.setattr(replicas, "broadcast_to_group", lambda *_: None)
    monkeypatch.setattr(replicas, "collective_device", lambda group: torch.device("cuda"))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    with FakeTensorMode():
        # without initial values, for which torch 2.9 would ask the driver
        model = nn.ParameterList(nn.Parameter(torch.empty(*shape, device="cuda")) for shape in ((2, 2), (2,), (2, 2)))
        averager = GradientAverager(model, None, bucket_bytes=8)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for _ in range(2):
            averager._finish()
        assert all(parameter.grad.device.type == "cuda" for parameter in model.parameters())  # type: ignore[union-attr]
    assert made == [], "no list of the host is copied to the device"


@ranks(2)
def test_a_gradient_that_some_rank_has_is_averaged_and_one_that_none_has_stays_none(rank: int, world: int) -> None:
    model = Partly()
    averager = GradientAverager(model, None)
    for uses in ([True, True], [True, False], [True, True]):
        model.zero_grad()
        model(uses[rank]).backward()
        assert model.always.grad is not None
        assert model.some.grad is not None
        assert model.always.grad.tolist() == [1.0, 1.0]
        assert model.some.grad.tolist() == [sum(uses) / 2] * 2
        assert model.never.grad is None
    averager.remove()


@ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_sharded_stages_are_clipped_with_two_collectives(rank: int, world: int, norm_type: float) -> None:
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    full, model = make_model(), make_model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader(8))
    batch = next(iter(loader))
    accelerator.backward(token_loss(model(batch["input_ids"]), shift(batch["labels"])))
    for part in list(make_loader(8))[:2]:  # the data parallel ranks read batches of their own
        (token_loss(full(part["input_ids"]), shift(part["labels"])) / 2).backward()
    calls: list[Any] = []
    all_reduce = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *args, **options: calls.append(1) or all_reduce(*args, **options))
        total = accelerator.clip_grad_norm_(model.parameters(), 1e-3, norm_type)
    expected = nn.utils.clip_grad_norm_(full.parameters(), 1e-3, norm_type)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=0)
    assert len(calls) == 2, "over the shards of the stage, then over the stages"
    names = dict(full.named_parameters())
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        actual = parameter.grad.full_tensor()
        torch.testing.assert_close(actual, names[name].grad, rtol=1e-3, atol=1e-7)
