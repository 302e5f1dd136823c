"""Data parallel replicas train as one process would."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_integrations.engines.ddp import DDPEngine, sync_next_backward
from accel_integrations.unwrap import extract_model_from_parallel
from accel_state.accelerator_state import AcceleratorState
from accel_state.mesh import ParallelismConfig
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.ddp import DistributedDataParallelKwargs
from tests.integrations.training import (
    FEATURES,
    assert_same_gradients,
    loss_of,
    new_batch,
    new_engine,
    new_model,
    prepare,
)
from tests.support.ranks import ranks

STEPS = 5


def train_alone(batch_size: int, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = loss_of(model, new_batch(batch_size, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_replicas(rank: int, world: int, batch_size: int, *handlers: Any) -> tuple[list[float], nn.Module]:
    engine = new_engine(handlers=handlers)
    model = new_model(seed=rank)  # replicas must start equal nevertheless
    model, optimizer = prepare(engine, model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, new_batch(batch_size, seed=step)[rank::world])
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses, model


@ranks(1, 2, 4)
def test_losses_and_weights_are_those_of_one_process(rank: int, world: int) -> None:
    losses, model = train_replicas(rank, world, batch_size=8)
    expected_losses, expected = train_alone(batch_size=8)
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    for name, tensor in extract_model_from_parallel(model).state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


@pytest.mark.sample(2)
@ranks(2)
@pytest.mark.parametrize(
    ("hook", "wrapper", "tolerance"),
    [
        ("no", "no", 1e-6),
        ("fp16", "no", 1e-3),
        ("bf16", "no", 1e-2),
        ("power_sgd", "no", 0.3),
        ("batched_power_sgd", "no", 0.3),
        ("power_sgd", "fp16", 0.3),
        ("batched_power_sgd", "bf16", 0.3),
    ],
)
def test_compressed_gradients_train_nearly_equally(
    rank: int, world: int, hook: str, wrapper: str, tolerance: float
) -> None:
    option = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2} if "power" in hook else {}
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=option)  # type: ignore[arg-type]
    losses, model = train_replicas(rank, world, 8, handler)
    assert losses == pytest.approx(train_alone(8)[0], abs=tolerance)
    for parameter in model.parameters():  # compression is lossy, but all replicas lose the same
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        torch.testing.assert_close(parameter.detach(), first, atol=0, rtol=0)


@ranks(2)
def test_arguments_reach_the_replica(rank: int, world: int) -> None:
    handler = DistributedDataParallelKwargs(
        find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=3, broadcast_buffers=False
    )
    model = prepare(new_engine(handlers=[handler]), new_model())
    assert isinstance(model, DistributedDataParallel)
    assert model.find_unused_parameters
    assert model.gradient_as_bucket_view
    assert not model.broadcast_buffers
    assert model.device_ids is None
    AcceleratorState._reset_state()
    losses, model = train_replicas(rank, world, 8, DistributedDataParallelKwargs(static_graph=True))
    assert model.static_graph
    assert losses == pytest.approx(train_alone(8)[0], abs=1e-6)


@ranks(2)
def test_models_without_trainable_parameters_are_not_replicated(rank: int) -> None:
    engine = new_engine()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert engine.prepare_model(frozen) is frozen
    assert not isinstance(engine.prepare_model(nn.ReLU()), DistributedDataParallel)
    teacher = nn.Linear(2, 2)
    assert engine.prepare_model(teacher, evaluation=True) is teacher
    with engine.no_sync(frozen):
        pass
    with sync_next_backward(frozen):
        pass


# ---- exchanging gradients or not --------------------------------------------------------------------------------


@ranks(2)
def test_accumulating_without_sync_gives_the_gradient_of_all_batches(rank: int, world: int) -> None:
    engine = new_engine()
    model = prepare(engine, new_model())
    batches = new_batch(12).chunk(3)
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch[rank::world]) / len(batches)
        if number < len(batches) - 1:
            with engine.no_sync(model):
                engine.backward(loss_of(model, batch[rank::world]) / len(batches))
        else:
            engine.backward(loss)
    alone = new_model()
    loss_of(alone, torch.cat(batches)).backward()
    assert_same_gradients(model, alone)


@ranks(2)
def test_without_sync_gradients_stay_local_unless_backward_is_to_all_reduce_them(rank: int, world: int) -> None:
    engine = new_engine()
    model, alone = prepare(engine, new_model()), new_model()
    with engine.no_sync(model):
        engine.backward(loss_of(model, new_batch(4, seed=rank)))
    loss_of(alone, new_batch(4, seed=rank)).backward()
    assert_same_gradients(model, alone)
    for one in (model, alone):
        one.zero_grad()
    with engine.no_sync(model):
        loss = loss_of(model, new_batch(8)[rank::world])
    with sync_next_backward(model):
        engine.backward(loss)
    loss_of(alone, new_batch(8)).backward()
    assert_same_gradients(model, alone)


@ranks(2)
def test_the_same_holds_for_compiled_replicas(rank: int, world: int) -> None:
    engine = new_engine()
    replica = prepare(engine, new_model())
    model = torch.compile(replica, backend="eager")
    with engine.no_sync(model):
        assert not replica.require_backward_grad_sync
    assert replica.require_backward_grad_sync
    replica.require_backward_grad_sync = False
    with sync_next_backward(model):
        assert replica.require_backward_grad_sync
    assert not replica.require_backward_grad_sync


# ---- uneven inputs ----------------------------------------------------------------------------------------------


def add_shard(engine: Any) -> Any:
    """Add a loader that shares out a map-style data set; what it has as its `batch_sampler`."""
    shard = SimpleNamespace(even_batches=True)
    engine.context.prepared.dataloaders.append(SimpleNamespace(batch_sampler=shard))
    return shard


@ranks(2)
def test_processes_may_run_out_of_batches_at_different_times(rank: int, world: int) -> None:
    engine = new_engine()
    model, optimizer = prepare(engine, new_model(), torch.optim.SGD(new_model().parameters(), lr=0.1))
    shard = add_shard(engine)
    steps = 0
    with engine.join([model], even_batches=False):
        assert shard.even_batches is False
        for step in range(3 + 2 * rank):
            engine.backward(loss_of(model, new_batch(4, seed=step)))
            steps += 1
    assert shard.even_batches is True
    assert steps == 3 + 2 * rank


@ranks(2)
def test_the_loaders_are_set_back_after_an_error_and_those_that_cannot_change_are_mentioned(rank: int) -> None:
    engine = new_engine()
    model = prepare(engine, new_model())
    shard = add_shard(engine)
    with pytest.raises(TypeError, match="Linear"), engine.join([nn.Linear(1, 1)], even_batches=False):
        pass
    assert shard.even_batches is True
    with engine.join([model], even_batches=None):
        assert shard.even_batches is True
    engine.context.prepared.dataloaders.append(SimpleNamespace(batch_sampler=None))
    with pytest.warns(UserWarning, match="1 prepared data loaders"), engine.join([model], even_batches=False):
        pass


@ranks(2)
def test_weights_of_windows_cannot_be_reduced_unevenly(rank: int) -> None:
    engine = new_engine(accumulation=GradientAccumulationPlugin(num_steps=2, average_over="weights"))
    model = prepare(engine, new_model())
    with pytest.raises(ValueError, match="weight=0"):
        engine.join([model], even_batches=None)


# ---- the rest ---------------------------------------------------------------------------------------------------


@ranks(2)
def test_other_axes_than_replicas_are_refused(rank: int) -> None:
    engine = new_engine()
    assert isinstance(engine, DDPEngine)
    engine.context.state.parallelism_config = ParallelismConfig(dp_replicate_size=2)
    engine.check()
    assert engine.data_shard().index == rank
    engine.context.state.parallelism_config = ParallelismConfig(dp_shard_size=2)
    with pytest.raises(
        ValueError, match=r"dp_shard_size=2, but Linear is not sharded, .* FullyShardedDataParallelPlugin"
    ):
        engine.check_model(nn.Linear(2, 2))
    engine.context.state.parallelism_config = ParallelismConfig(pp_size=2)
    with pytest.raises(ValueError, match="uses pp, but the 'ddp' engine supports only dp_replicate, cp, sp, tp"):
        engine.check()


class TwoHeads(nn.Module):
    """A model whose second head is not part of every loss, with a method that programs call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 2)
        self.frozen = nn.Linear(FEATURES, 2)
        self.second = nn.Linear(FEATURES, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.first(inputs)

    def describe(self) -> str:
        return "two heads"


@ranks(2)
def test_torchs_errors_say_what_to_write_in_the_program(rank: int) -> None:
    engine = new_engine()
    model = TwoHeads()
    model.frozen.requires_grad_(False)
    model = prepare(engine, model)
    with pytest.raises(
        AttributeError, match="'DistributedDataParallel' object has no attribute 'describe'"
    ) as missing:
        model.describe()
    assert "accelerator.unwrap_model(model).describe" in missing.value.__notes__[0]
    with pytest.raises(AttributeError) as unknown:
        _ = model.nowhere
    assert not hasattr(unknown.value, "__notes__")
    assert "accelerator.unwrap_model(model).second" in note_on_attribute(
        torch.compile(model, backend="eager"), "second"
    )

    engine.backward(loss_of(model, new_batch(4)))
    model.module.first.bias.requires_grad_(
        False
    )  # torch's numbers are those of the parameters that were trainable before
    with pytest.raises(RuntimeError, match="did not receive grad for rank") as unused:
        model(new_batch(4))
    (note,) = unused.value.__notes__
    assert note.startswith("Without a gradient in the last step: second.weight, second.bias. ")
    assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in note


def note_on_attribute(model: nn.Module, name: str) -> str:
    with pytest.raises(AttributeError) as missing:
        getattr(model, name)
    return missing.value.__notes__[0]


@ranks(2)
def test_a_pickled_replica_is_torchs_own(rank: int) -> None:
    model = prepare(new_engine(), new_model())
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied) is DistributedDataParallel
    assert torch.equal(copied(new_batch(2)), model(new_batch(2)))


@ranks(2)
def test_the_full_state_has_plain_names_and_batch_norm_stays_the_users_choice(rank: int) -> None:
    engine = new_engine()
    model = prepare(engine, nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3)))
    assert (
        {"0.weight", "0.bias", "1.running_mean"}
        <= set(engine.full_state_dict(model))
        == set(model.module.state_dict())
    )
    assert type(model.module[1]) is nn.BatchNorm1d
