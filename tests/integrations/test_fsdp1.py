"""Models wrapped in `FullyShardedDataParallel`: every setting reaches torch, and the numbers are those of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from accel_state.accelerator_state import AcceleratorState
from accel_state.mesh import ParallelismConfig
from accelerate import Accelerator
from tests.integrations.test_fsdp2 import accelerator_with as accelerator_of
from tests.integrations.test_fsdp2 import loss_of, my_rows, one_batch
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_model

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
accelerator_with = partial(accelerator_of, version=1)


def assert_trains_as_one_process(accelerator: Accelerator, rank: int, world: int) -> None:
    model = make_model()
    optimizer = MOMENTUM(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    twin = make_model()
    stepper = MOMENTUM(twin.parameters())
    for _ in range(4):
        loss = loss_of(model, my_rows(one_batch(), rank, world))
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected = loss_of(twin, one_batch())
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        stepper.step()
        stepper.zero_grad()
        torch.testing.assert_close(accelerator.reduce(loss.detach(), "mean"), expected.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=1e-5)
    state = accelerator.get_state_dict(model)
    assert set(state) == (set(twin.state_dict()) if rank == 0 else set())
    for name, value in state.items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=0, atol=1e-5)


SETTINGS: dict[str, dict[str, Any]] = {
    "flat parameters": {"use_orig_params": False},
    "one piece": {"auto_wrap_policy": "no_wrap"},
    "by size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 2000},
    "gradients only": {"sharding_strategy": "SHARD_GRAD_OP"},
    "hybrid on one machine": {"sharding_strategy": "HYBRID_SHARD"},
    "checkpointed activations": {"activation_checkpointing": True},
    "synchronised states": {"sync_module_states": True, "cpu_ram_efficient_loading": True},
    "offload and prefetch": {"cpu_offload": True, "forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("settings", SETTINGS)
@ranks(2)
def test_settings(rank: int, world: int, settings: str) -> None:
    assert_trains_as_one_process(accelerator_with(**SETTINGS[settings]), rank, world)


@ranks(4)
def test_replicas_of_shards(rank: int, world: int) -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    assert_trains_as_one_process(accelerator_with(config=config), rank, world)


@ranks(2)
def test_starts_with_the_values_of_the_first_process(rank: int, world: int) -> None:
    accelerator = accelerator_with(cpu_ram_efficient_loading=True, sync_module_states=True)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = make_model()
    model = accelerator.prepare(model)
    for name, value in accelerator.get_state_dict(model).items():
        assert torch.equal(value, make_model().state_dict()[name])


@ranks(2)
def test_groups_that_share_a_flat_parameter_are_refused(rank: int, world: int) -> None:
    accelerator = accelerator_with(use_orig_params=False)
    model = make_model()
    biases = [one for one in model.parameters() if one.dim() == 1]
    others = [one for one in model.parameters() if one.dim() > 1]
    optimizer = torch.optim.SGD([{"params": biases}, {"params": others, "weight_decay": 0.1}], lr=0.1)
    with pytest.raises(ValueError, match="use_orig_params"):
        accelerator.prepare(model, optimizer)


@ranks(2)
def test_other_axes_and_an_optimizer_with_state_of_whole_parameters_are_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="fsdp_version=2"):
        accelerator_with(config=ParallelismConfig(tp_size=2))
    AcceleratorState._reset_state()
    accelerator = accelerator_with()
    model = make_model()
    with pytest.raises(ValueError, match="Adagrad made its state before the engine 'fsdp1'.* of the prepared model"):
        accelerator.prepare(model, torch.optim.Adagrad(model.parameters()))
