"""Accumulation, backward, clipping and triggers in one process."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.handlers import GradScalerKwargs
from accelerate import Accelerator


def prepared(accelerator: Accelerator, batches: int = 5) -> tuple[nn.Module, Any, Any]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = DataLoader(torch.arange(1.0, batches + 1).view(-1, 1), batch_size=1)
    return accelerator.prepare(model, optimizer, data)


def decisions(accelerator: Accelerator, model: nn.Module, loader: Any) -> list[tuple[int, bool]]:
    actual = []
    for _ in loader:
        with accelerator.accumulate(model):
            actual.append((accelerator.step, accelerator.sync_gradients))
    return actual


# ---- when a window ends -------------------------------------------------------------------------------------------------


def test_a_window_ends_when_it_is_full_or_the_data_are() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _, loader = prepared(accelerator)
    expected = [(1, False), (2, True), (3, False), (4, True), (0, True)]
    assert decisions(accelerator, model, loader) == expected
    assert decisions(accelerator, model, loader) == expected  # every epoch begins anew


def test_windows_may_span_epochs() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, _, loader = prepared(accelerator)
    assert [sync for _, sync in decisions(accelerator, model, loader)] == [False, True, False, True, False]
    assert [sync for _, sync in decisions(accelerator, model, loader)] == [True, False, True, False, True]
    assert accelerator.step == 10


def test_windows_are_counted_without_a_loader_too() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, *_ = prepared(accelerator)
    assert decisions(accelerator, model, range(4)) == [(1, False), (2, False), (3, True), (4, False)]
    accelerator.gradient_accumulation_steps = 5
    assert decisions(accelerator, model, range(2)) == [(5, True), (6, False)]
    accelerator.step = 9
    assert decisions(accelerator, model, range(1)) == [(10, True)]


def test_without_accumulation_every_batch_is_a_window() -> None:
    accelerator = Accelerator(cpu=True)
    model, _, loader = prepared(accelerator, 2)
    assert decisions(accelerator, model, loader) == [(1, True), (0, True)]


def test_accumulate_needs_no_models() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for expected in (False, True):
        with accelerator.accumulate():
            assert accelerator.sync_gradients is expected


def test_accumulate_as_a_decorator_counts_every_call() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    @accelerator.accumulate()
    def train() -> bool:
        return accelerator.sync_gradients

    assert [train(), train(), train()] == [False, True, False]


def test_an_error_inside_passes() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, *_ = prepared(accelerator)
    with pytest.raises(KeyError, match="mine"), accelerator.accumulate(model, model):
        raise KeyError("mine")


def test_accumulate_without_prepare_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with (
        pytest.raises(RuntimeError, match=r"accumulate\(\) got Linear.*not prepared anything.*accelerator\.prepare\("),
        accelerator.accumulate(nn.Linear(1, 1)),
    ):
        pass
    assert accelerator.step == 0


def test_what_was_freed_may_still_be_used() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.free_memory()
    for expected in (False, True):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            assert accelerator.sync_gradients is expected


@pytest.mark.filterwarnings("ignore:This Accelerator sets gradient_accumulation_steps=1 for all")
def test_models_may_come_in_a_list_be_unprepared_beside_an_optimizer_or_be_prepared_elsewhere() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    quantised = nn.Linear(1, 1)  # left on its devices, as models with adapters are
    optimizer = accelerator.prepare(torch.optim.SGD(quantised.parameters(), lr=1.0))
    start = quantised.weight.item()
    for expected in (start, start - 2.0 / 2):
        with accelerator.accumulate([quantised]):
            accelerator.backward(quantised(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert quantised.weight.item() == pytest.approx(expected)
    model = accelerator.prepare_model(nn.Linear(1, 1))
    with Accelerator(cpu=True).accumulate(model):
        pass
    growing: list[Any] = [model]
    with accelerator.accumulate(growing):
        growing.append(3)
    with pytest.raises(TypeError, match="accumulate.. got 3 of type int"):
        accelerator.accumulate(growing).__enter__()


def test_accumulate_takes_models_only() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, _ = prepared(accelerator)
    with pytest.raises(TypeError, match=r"(?s)accumulate\(\) got .*of type AcceleratedOptimizer.*prepared models"):
        accelerator.accumulate(optimizer).__enter__()


def test_parts_and_wrappers_of_prepared_models_are_fine() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(1, 1)))
    for other in (model[0], nn.Sequential(model)):
        with accelerator.accumulate(other):
            assert accelerator.sync_gradients


# ---- backward -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_divided_by_the_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, *_ = prepared(accelerator)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 0.25


def test_the_loss_is_the_same_tensor_without_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    model, *_ = prepared(accelerator)
    loss = model(torch.ones(1, 1)).sum()
    seen = []
    monkeypatch.setattr(accelerator.engine, "backward", lambda loss, **kwargs: seen.append((loss, kwargs)))
    accelerator.backward(loss, retain_graph=True)
    assert seen[0][0] is loss
    assert seen[0][1] == {"retain_graph": True}


def test_a_training_loop_equals_one_written_by_hand() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accelerator)
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - 1).square().sum())
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    expected = torch.ones(1, 1, requires_grad=True)
    by_hand = torch.optim.SGD([expected], lr=0.5)
    for step, x in enumerate(torch.arange(1.0, 6.0).view(-1, 1, 1)):
        ((x @ expected - 1).square().sum() / 2).backward()
        nn.utils.clip_grad_norm_([expected], 0.1)
        if step % 2 or step == 4:
            by_hand.step()
            by_hand.zero_grad()
    torch.testing.assert_close(model.weight, expected)


# ---- clipping and scaling -----------------------------------------------------------------------------------------------


def test_clipping_returns_the_norm_before() -> None:
    accelerator = Accelerator(cpu=True)
    model, *_ = prepared(accelerator)
    accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 4.0
    assert model.weight.grad.item() == pytest.approx(1.0, abs=1e-5)
    model.weight.grad.fill_(-4.0)
    assert accelerator.clip_grad_norm_(iter(model.parameters()), 2.0, norm_type="inf").item() == 4.0
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert model.weight.grad.item() == -0.5


def test_unscaling_takes_prepared_optimizers() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, _ = prepared(accelerator)
    seen: list[Any] = []
    accelerator.engine.unscale_gradients = lambda optimizers: seen.append(list(optimizers))  # type: ignore[method-assign]
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(optimizer)
    accelerator.unscale_gradients([optimizer])
    assert seen == [[optimizer.optimizer]] * 3


def test_scaled_gradients_are_clipped_at_their_true_size_and_bad_steps_are_skipped() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer, _ = prepared(accelerator)
    accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
    assert model.weight.grad.item() == 4096.0
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 4.0
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert model.weight.item() == pytest.approx(0.5, abs=1e-5)
    optimizer.zero_grad()
    accelerator.backward(model(torch.full((1, 1), float("inf"))).sum())
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert model.weight.item() == pytest.approx(0.5, abs=1e-5)


def test_handlers_of_the_scaler_are_kept() -> None:
    handler = GradScalerKwargs(init_scale=4.0)
    assert Accelerator(cpu=True, kwargs_handlers=[handler]).scaler_handler is handler


# ---- LOMO ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lomo(monkeypatch: pytest.MonkeyPatch) -> type[torch.optim.Optimizer]:
    """A stand-in that counts; the library itself runs in tests/clients."""

    class Lomo(torch.optim.Optimizer):
        calls: list[Any] = []

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
            self.calls.append((loss.item(), lr))

    Lomo.__module__ = "lomo_optim.lomo"
    module = types.ModuleType("lomo_optim")
    module.Lomo = Lomo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lomo_optim", module)
    return Lomo


def test_lomo_updates_within_backward(lomo: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    assert not accelerator.has_lomo_optimizer
    accelerator.prepare(model, lomo(model.parameters()))
    assert accelerator.has_lomo_optimizer
    accelerator.backward(model(torch.ones(1, 1)).sum(), learning_rate=0.2)
    accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), 0.3)
    assert lomo.calls == [(0.5, 0.2), (1.0, 0.3)]
    with pytest.raises(ValueError, match="learning_rate=None"):
        accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("installed", "says"), [(False, "lomo-optim"), (True, "needs a prepared Lomo or AdaLomo")])
def test_lomo_backward_needs_its_optimizer(installed: bool, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_integrations.prepared.optimizer.is_lomo_available", lambda: installed)
    accelerator = Accelerator(cpu=True)
    model, *_ = prepared(accelerator)
    with pytest.raises(ValueError if installed else ImportError, match=says):
        accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), 0.1)


# ---- other contexts -----------------------------------------------------------------------------------------------------


def test_contexts_that_have_nothing_to_do_in_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    model, *_ = prepared(accelerator)
    with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 1.0
    with accelerator.maybe_context_parallel([torch.ones(2)], [0], set()):
        pass
    with pytest.warns(UserWarning, match="no effect"), accelerator.join_uneven_inputs([model]):
        pass
    loader = object()
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader


def test_triggers() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.flag_tensor is None
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.flag_tensor is not None
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    accelerator.flag_tensor = torch.tensor(1)
    assert accelerator.check_trigger()
