"""Number formats: what is computed in which, and steps that are skipped for infinities."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accel_integrations.precision.autocast import BFloat16Precision, FullPrecision
from accel_integrations.precision.loss_scale import Float16Precision
from accel_integrations.precision.precision import Precision
from accel_integrations.unwrap import extract_model_from_parallel
from accel_state.accelerator_state import AcceleratorState
from accel_state.settings.handlers import AutocastKwargs, GradScalerKwargs
from tests.integrations.training import FEATURES, loss_of, new_batch, new_engine, new_model, prepare


class Notes(nn.Module):
    """Notes in which format it computes, and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, inputs: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        logits = self.layer(inputs) * scale
        self.seen = logits.dtype
        return {"logits": logits, "parts": (logits[0], [logits.argmax()]), "name": "notes"}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", torch.float32)])
def test_forward_computes_in_the_format_and_returns_float32(name: str, dtype: torch.dtype) -> None:
    model = prepare(new_engine(name), Notes())
    outputs = model(new_batch(3), scale=2.0)
    assert model.seen == dtype
    assert outputs["logits"].dtype == torch.float32
    assert outputs["parts"][0].dtype == torch.float32
    assert outputs["parts"][1][0].dtype == torch.int64
    assert outputs["name"] == "notes"
    assert model.layer.weight.dtype == torch.float32


def test_bf16_trains_like_autocast_by_hand() -> None:
    engine = new_engine("bf16")
    model = new_model()
    plain = model.forward
    for _ in range(2):
        prepare(engine, model)
        assert model.forward.__wrapped__ == model._original_forward == plain, "it is not wrapped twice"
    alone = new_model()
    batch = new_batch(6)
    engine.backward(loss_of(model, batch))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = alone(batch)
    outputs.float().square().mean().backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, expected.grad)


def test_handlers_switch_autocast_off_and_that_of_the_run_holds_for_the_model() -> None:
    engine = new_engine("bf16")
    with engine.precision.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    with engine.precision.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
    AcceleratorState._reset_state()
    engine = new_engine("fp16", handlers=[AutocastKwargs(enabled=False)])
    model = prepare(engine, Notes())
    model(new_batch(1))
    assert model.seen == torch.float32
    with engine.precision.autocast(AutocastKwargs(enabled=True)):
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_full_precision_changes_nothing_and_unknown_ones_are_refused() -> None:
    engine = new_engine()
    model = Notes()
    forward = model.forward
    assert prepare(engine, model).forward == forward
    assert engine.precision.scaler is None
    assert engine.precision.state_dict() is None
    engine.precision.load_state_dict({})
    with engine.precision.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(NotImplementedError, match=r"'fp4' is not supported.*'bf16'"):
        engine.make_precision("fp4")


# ---- the changed forward ----------------------------------------------------------------------------------------


def test_the_signature_stays_and_copies_compute_by_themselves() -> None:
    model = prepare(new_engine("bf16"), Notes())
    assert list(inspect.signature(model.forward).parameters) == ["inputs", "scale"]
    assert model.forward.__wrapped__.__func__ is Notes.forward
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.layer.weight.zero_()
            twin.layer.bias.fill_(3.0)
        assert torch.equal(twin(new_batch(1))["logits"], torch.full((1, 2), 3.0))
        assert twin.seen == torch.bfloat16
    assert not torch.equal(model(new_batch(1))["logits"], torch.full((1, 2), 3.0))


def test_unwrapping_restores_the_forward() -> None:
    model = prepare(new_engine("bf16"), Notes())
    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(model)(new_batch(1))["logits"].dtype == torch.float32
    plain = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert plain is model
    assert "forward" not in vars(plain)
    assert "_original_forward" not in vars(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert plain(new_batch(1))["logits"].dtype == torch.bfloat16
    assert extract_model_from_parallel(plain, keep_fp32_wrapper=False) is plain

    def own(inputs: torch.Tensor) -> str:
        return "mine"

    model = Notes()
    model.forward = own  # type: ignore[assignment, method-assign]
    prepared = prepare(new_engine("bf16"), model)
    assert prepared(new_batch(1)) == "mine"
    assert extract_model_from_parallel(prepared, keep_fp32_wrapper=False).forward is own


# ---- loss scaling -----------------------------------------------------------------------------------------------


def fp16_engine(*models: nn.Module, **scaling: Any) -> tuple[Any, list[Any]]:
    options = {"init_scale": 4.0, "growth_interval": 1000, **scaling}
    engine = new_engine("fp16", handlers=[GradScalerKwargs(**options)])
    return engine, [prepare(engine, model, torch.optim.SGD(model.parameters(), lr=1.0))[1] for model in models]


def set_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_losses_are_scaled_and_gradients_are_not() -> None:
    model, alone = new_model(), new_model()
    engine, (optimizer,) = fp16_engine(model)
    batch = new_batch(6)
    loss = loss_of(model, batch)
    engine.backward(loss)
    loss_of(alone, batch).backward()
    scaled = next(model.parameters()).grad
    torch.testing.assert_close(scaled, 4 * next(alone.parameters()).grad, rtol=0.01, atol=0.01)
    for _ in range(2):  # the second time must change nothing
        engine.unscale_gradients([optimizer.optimizer])
    torch.testing.assert_close(scaled, next(alone.parameters()).grad, rtol=0.01, atol=0.01)
    before = next(model.parameters()).detach().clone()
    optimizer.step()
    assert not optimizer.step_was_skipped
    torch.testing.assert_close(next(model.parameters()), before - scaled)


def test_a_loss_that_was_not_scaled_is_named() -> None:
    model = new_model()
    engine, (optimizer,) = fp16_engine(model)
    loss_of(model, new_batch(6)).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in (optimizer.step, lambda: engine.unscale_gradients([optimizer.optimizer])):
        with pytest.raises(RuntimeError, match=r"Call accelerator.backward\(loss\) instead of loss.backward\(\)"):
            step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_step_with_infinities_is_skipped_and_the_scale_falls_and_is_stored() -> None:
    model = new_model()
    engine, (optimizer,) = fp16_engine(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine.precision.scale(torch.ones(1))
    set_gradients(model, float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    stored = engine.precision.state_dict()
    assert stored["scale"] == engine.precision.scaler.get_scale() == 2.0
    other = Float16Precision("cpu", engine.context.handlers)
    other.load_state_dict(stored)
    assert other.scaler.get_scale() == 2.0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    engine.precision.scale(torch.ones(1))
    set_gradients(model, 2.0)
    optimizer.step()
    assert not optimizer.step_was_skipped
    torch.testing.assert_close(next(model.parameters()), before[0] - 1.0)


def test_one_optimizers_infinities_leave_the_others_gradients_right() -> None:
    first, second = new_model(), new_model(seed=1)
    engine, (one, two) = fp16_engine(first, second)
    before = next(second.parameters()).detach().clone()
    engine.precision.scale(torch.ones(1))
    set_gradients(first, float("inf"))
    set_gradients(second, 8.0)
    one.step()
    two.step()
    assert one.step_was_skipped
    assert not two.step_was_skipped
    torch.testing.assert_close(next(second.parameters()), before - 8.0 / 4.0)
    assert engine.precision.scaler.get_scale() == 2.0


def test_optimizers_may_step_after_backwards_of_their_own() -> None:
    first, second = new_model(), new_model(seed=1)
    engine, (one, two) = fp16_engine(first, second)
    engine.precision.scale(torch.ones(1))
    set_gradients(first, float("inf"))
    one.step()
    assert engine.precision.scale(torch.ones(1)).item() == 2.0  # adapted before the next backward
    before = next(second.parameters()).detach().clone()
    set_gradients(second, 8.0)
    two.step()
    torch.testing.assert_close(next(second.parameters()), before - 8.0 / 2.0)


def test_a_step_may_be_taken_again_with_gradients_set_by_hand() -> None:
    first, second = new_model(), new_model(seed=1)
    engine, (one, _) = fp16_engine(first, second)
    engine.precision.scale(torch.ones(1))
    for _ in range(2):
        set_gradients(first, 1.0)
        one.step()
    assert not one.step_was_skipped


def test_optimizers_that_unscale_themselves_get_the_scaler() -> None:
    """As those of apex do, which have the argument in the signature of `step`."""

    class Unscales(torch.optim.SGD):
        _step_supports_amp_scaling = True
        got: Any = None

        def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
            self.got = grad_scaler
            grad_scaler._check_inf_per_device(self)

    model = new_model()
    engine = new_engine("fp16", handlers=[GradScalerKwargs(init_scale=4.0)])
    optimizer = prepare(engine, model, Unscales(model.parameters(), lr=1.0))[1]
    engine.precision.scale(torch.ones(1))
    set_gradients(model, 1.0)
    with pytest.warns(FutureWarning, match="passing itself as a keyword argument"):
        optimizer.step()
    assert optimizer.optimizer.got is engine.precision.scaler
    assert not optimizer.step_was_skipped


def test_the_scaler_can_be_switched_off() -> None:
    model = new_model()
    engine, (optimizer,) = fp16_engine(model, enabled=False)
    loss = torch.ones(())
    assert engine.precision.scale(loss) is loss
    set_gradients(model, 1.0)
    before = next(model.parameters()).detach().clone()
    engine.unscale_gradients([optimizer.optimizer])
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(next(model.parameters()), before - 2.0)


def test_fp16_trains_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = new_model()
    engine, (optimizer,) = fp16_engine(model, init_scale=2.0**16)
    batch = new_batch(16)
    losses = []
    for _ in range(20):
        loss = loss_of(model, batch)
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_old_functions_give_the_context_and_the_scaler_of_the_run() -> None:
    from accelerate.utils import get_grad_scaler, get_mixed_precision_context_manager

    new_engine("bf16")
    layer = nn.Linear(2, 2)
    with get_mixed_precision_context_manager(native_amp=True):
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    with get_mixed_precision_context_manager():
        assert layer(torch.ones(1, 2)).dtype == torch.float32
    assert get_grad_scaler(init_scale=8.0).state_dict()["scale"] == 8.0


def test_a_precision_that_scales_is_asked_in_every_step_and_others_are_not() -> None:
    class OnlyUnscales(Precision):
        name = "no"

        def unscale(self, optimizer: torch.optim.Optimizer) -> None:
            """Nothing."""

    assert [kind.scales for kind in (FullPrecision, BFloat16Precision, Float16Precision, OnlyUnscales)] == [
        False, False, True, True,
    ]  # fmt: skip
