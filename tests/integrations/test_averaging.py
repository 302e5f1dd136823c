"""Windows whose gradient is that of one large batch, for any split into micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_integrations.engines.engine import Engine
from accel_integrations.parallel.replicas import mean_over_tokens
from accel_state.gradient_state import GradientState
from accel_state.settings.accumulation import GradientAccumulationPlugin
from tests.integrations.training import loss_of, new_batch, new_engine, new_model, prepare
from tests.support.ranks import ranks


def averaging_engine(average_over: str, mixed_precision: str = "no") -> Engine:
    plugin = GradientAccumulationPlugin(num_steps=8, average_over=average_over)  # type: ignore[arg-type]
    return new_engine(mixed_precision, accumulation=plugin)


def run_window(engine: Engine, model: nn.Module, batches: list[torch.Tensor], weighted: bool) -> None:
    """The backwards of one window: only the last synchronizes gradients."""
    state = GradientState()
    for number, batch in enumerate(batches):
        is_last = number == len(batches) - 1
        state._set_sync_gradients(is_last)
        engine.averaging.begin_batch()
        loss = engine.averaging.add(loss_of(model, batch), len(batch) if weighted else None)
        if is_last:
            engine.backward(loss)
        else:
            with engine.no_sync(model):
                engine.backward(loss)
        engine.averaging.end_batch()


def big_batch_gradients(items: torch.Tensor) -> list[torch.Tensor]:
    alone = new_model().double()
    loss_of(alone, items.double()).backward()
    return [parameter.grad for parameter in alone.parameters()]  # type: ignore[misc]


def assert_gradients(model: nn.Module, expected: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=tolerance, check_dtype=False)


def prepared_in_double(average_over: str) -> tuple[Engine, Any, Any]:
    engine = averaging_engine(average_over)
    model = new_model().double()
    return engine, *prepare(engine, model, torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.sample(2)
@ranks(1, 2, 4)
def test_any_split_gives_the_big_batchs_gradient(rank: int, world: int) -> None:
    engine, model, optimizer = prepared_in_double("weights")
    generator = torch.Generator().manual_seed(3)
    for trial in range(12):
        num_batches = int(torch.randint(1, 5, (), generator=generator))
        sizes = torch.randint(1, 40, (world * num_batches,), generator=generator).tolist()
        items = new_batch(sum(sizes), seed=trial).double()
        run_window(engine, model, list(items.split(sizes))[rank::world], weighted=True)
        engine.averaging.finish_window()
        assert_gradients(model, big_batch_gradients(items))
        optimizer.step()  # finds the window finished
        assert_gradients(model, big_batch_gradients(items))
        optimizer.zero_grad()


@ranks(1, 2, 4)
def test_any_window_length_gives_the_big_batchs_gradient(rank: int, world: int) -> None:
    engine, model, optimizer = prepared_in_double("window")
    for num_batches in (1, 3, 8, 2):
        items = new_batch(3 * world * num_batches, seed=num_batches).double()
        run_window(engine, model, list(items.split(3))[rank::world], weighted=False)
        optimizer.step()
        assert_gradients(model, big_batch_gradients(items))
        optimizer.zero_grad()


@ranks(2)
def test_a_process_without_items_takes_part(rank: int, world: int) -> None:
    engine, model, optimizer = prepared_in_double("weights")
    items = new_batch(5).double()
    for _ in range(2):
        loss = loss_of(model, items)
        engine.backward(engine.averaging.add(loss, 5 if rank else 0))
        optimizer.step()
        assert_gradients(model, big_batch_gradients(items))
        optimizer.zero_grad()


@ranks(1, 2)
def test_a_window_without_any_items_teaches_nothing(rank: int) -> None:
    engine = averaging_engine("weights")
    model, optimizer = prepare(engine, new_model(), torch.optim.SGD(new_model().parameters(), lr=1.0))
    prepare(engine, model.module if hasattr(model, "module") else model, torch.optim.SGD(model.parameters(), lr=1.0))
    engine.backward(engine.averaging.add(loss_of(model, new_batch(3)), 0))
    optimizer.step()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def one_process(average_over: str, *models: nn.Module) -> tuple[Engine, list[Any]]:
    engine = averaging_engine(average_over)
    return engine, [prepare(engine, model, torch.optim.SGD(model.parameters(), lr=0.0))[1] for model in models]


def test_several_losses_of_a_micro_batch_add_up_and_parameters_of_two_optimizers_are_divided_once() -> None:
    model = new_model()
    engine, (one,) = one_process("window", model)
    _, two = prepare(engine, model, torch.optim.Adam(model.parameters(), lr=0.0))
    average: Any = engine.averaging
    batches = list(new_batch(8).chunk(2))
    for batch in batches:
        average.begin_batch()
        for share in (0.25, 0.75):
            engine.backward(average.add(loss_of(model, batch) * share))
    one.step()
    two.step()
    assert_gradients(model, big_batch_gradients(torch.cat(batches)))


@pytest.mark.parametrize("average_over", ["window", "weights"])
def test_models_that_train_in_turns_get_their_gradients(average_over: str) -> None:
    """As in adversarial training: one steps before the other's last backward."""
    models = [new_model(), new_model()]
    engine, optimizers = one_process(average_over, *models)
    average: Any = engine.averaging
    for window in range(2):
        batches = list(new_batch(10, seed=window).split([3, 7] if average_over == "weights" else 5))
        for number, batch in enumerate(batches):
            GradientState()._set_sync_gradients(number == 1)
            average.begin_batch()
            for model, optimizer in zip(models, optimizers, strict=True):
                engine.backward(average.add(loss_of(model, batch), len(batch) if average_over == "weights" else None))
                optimizer.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            assert_gradients(model, big_batch_gradients(torch.cat(batches)))
            optimizer.zero_grad()
        average.end_batch()


@pytest.mark.parametrize("average_over", ["window", "weights"])
def test_outside_of_micro_batches_every_loss_is_one_and_tensors_may_be_weights(average_over: str) -> None:
    model = new_model()
    engine, (optimizer,) = one_process(average_over, model)
    batches = list(new_batch(6).split([2, 2, 2] if average_over == "window" else [1, 3, 2]))
    for _ in range(2):
        for batch in batches:
            weight = torch.tensor(len(batch)) if average_over == "weights" else None
            engine.backward(engine.averaging.add(loss_of(model, batch), weight))
        optimizer.step()
        assert_gradients(model, big_batch_gradients(torch.cat(batches)))
        optimizer.zero_grad()


def test_the_default_costs_nothing_and_a_step_without_backward_divides_nothing() -> None:
    engine = new_engine()
    loss = torch.ones(())
    assert engine.averaging.add(loss) is loss
    assert not engine.averaging.is_by_window
    model = new_model()
    engine, (optimizer,) = one_process("window", model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(parameter.grad.eq(1).all() for parameter in model.parameters())


def test_gradients_in_float16_do_not_overflow() -> None:
    engine = averaging_engine("weights", "fp16")
    model = new_model()
    model, optimizer = prepare(engine, model, torch.optim.SGD(model.parameters(), lr=0.0))
    batch = new_batch(8)
    engine.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    engine.backward(engine.averaging.add(loss_of(model, batch), 100_000))
    engine.unscale_gradients([optimizer.optimizer])
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert_gradients(model, big_batch_gradients(batch), tolerance=2e-2)


# ---- bad weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan"), None])
def test_impossible_weights_are_refused(weight: Any) -> None:
    engine = averaging_engine("weights")
    with pytest.raises(ValueError, match="backward"):
        engine.averaging.add(torch.ones(()), weight)


def test_weights_that_would_not_count_are_refused() -> None:
    engine = averaging_engine("window")
    with pytest.raises(ValueError, match="average_over='weights'"):
        engine.averaging.add(torch.ones(()), 3)
    engine = averaging_engine("weights")
    average: Any = engine.averaging
    average.begin_batch()
    average.add(torch.ones(()), 3)
    average.add(torch.ones(()), torch.tensor(3))
    with pytest.raises(ValueError, match="one micro-batch"):
        average.add(torch.ones(()), 4)


@ranks(2)
def test_more_tokens_than_float16_can_count(rank: int) -> None:
    loss = torch.tensor(2.0 - rank, dtype=torch.float16, requires_grad=True)
    mean = mean_over_tokens(loss, 70_000 * (rank + 1), None, 2)
    assert mean.dtype == torch.float16
    torch.testing.assert_close(mean.detach(), torch.tensor(4 / 3, dtype=torch.float16))
    mean.backward()
    assert loss.grad is not None
    torch.testing.assert_close(loss.grad, torch.tensor((2 / 3, 4 / 3)[rank], dtype=torch.float16))
