"""What happens when a gradient is not finite, with every engine: the same on all ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_integrations.engines.deepspeed.engine import DeepSpeedEngine
from accel_integrations.engines.single import SingleEngine
from accel_integrations.engines.xla import XlaEngine
from accel_integrations.megatron.engine import MegatronLMEngine
from accel_ops.modules import to_local
from accelerate import Accelerator, finite_gradients
from accelerate.local_sgd import LocalSGD
from accelerate.utils import FiniteGradientsKwargs, gather_object
from tests.support.changed_engines import ENGINES
from tests.support.leaks import reset_state
from tests.support.ranks import ranks
from tests.support.tiny_transformer import LENGTH, VOCABULARY, make_model, shift, token_loss

STEPS, BAD = 6, 3
VARIABLE = "ACCELERATE_FINITE_GRADIENTS"


class Run:
    """Six optimizer steps of a small transformer; the gradients of one or more are not finite, as one rank causes it.

    Args:
        engine: A key of `ENGINES`.
        action: None to train without the handler.
        clips: Whether gradients are clipped.
        num_steps: Batches of an accumulation window.
        bad: The numbers of the steps, from 1.
        in_gradient_of: The rank has a NaN in its part of the first gradient whose name matches, and not in its loss.
        further: More arguments of `FiniteGradientsKwargs`.
    """

    def __init__(
        self,
        engine: str,
        action: Any,
        *,
        clips: bool,
        num_steps: int = 1,
        bad: tuple[int, ...] = (BAD,),
        in_gradient_of: str = "",
        **further: Any,
    ) -> None:
        handlers = [] if action is None else [FiniteGradientsKwargs(action=action, **further)]
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=num_steps, kwargs_handlers=handlers, **ENGINES[engine].settings()
        )
        self.clips, self.num_steps, self.bad, self.in_gradient_of = clips, num_steps, bad, in_gradient_of
        model = make_model(tied=True, layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        tokens = torch.randint(0, VOCABULARY, (STEPS * num_steps * 2 * self.count, LENGTH))
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, DataLoader(tokens, batch_size=2)
        )
        self.skipped: list[bool] = []

    @property
    def count(self) -> int:
        return self.accelerator.engine.data_shard().count

    def poison(self) -> None:
        named = [(name, one.grad) for name, one in self.model.named_parameters() if one.grad is not None]
        held = [to_local(grad) for name, grad in named if re.search(self.in_gradient_of, name)]
        next(grad for grad in held if grad.numel()).view(-1)[0] = float("nan")

    def train(self, leave_out: bool = False) -> list[torch.Tensor]:
        """The weights of this rank afterwards; with `leave_out`, bad steps are left out by hand."""
        accelerator, is_last = self.accelerator, self.accelerator.process_index == self.accelerator.num_processes - 1
        for index, batch in enumerate(self.loader):
            step = index // self.num_steps + 1
            is_bad = step in self.bad and index % self.num_steps == 0 and is_last and not leave_out
            with accelerator.accumulate(self.model):
                loss = token_loss(self.model(batch), shift(batch))
                accelerator.backward(loss * (float("nan") if is_bad and not self.in_gradient_of else 1.0))
                if self.in_gradient_of and step in self.bad and is_last and accelerator.sync_gradients:
                    self.poison()
                if self.clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                if not (leave_out and step in self.bad):
                    self.optimizer.step()
                    self.scheduler.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                self.skipped.append(accelerator.optimizer_step_was_skipped)
        return [to_local(weight).detach().clone() for weight in self.model.parameters()]


@contextmanager
def run_of(engine: str, action: Any, **options: Any) -> Iterator[Run]:
    torch.manual_seed(0)
    run = Run(engine, action, **options)
    yield run
    run.accelerator.free_memory()
    reset_state()


def is_finite(weights: list[torch.Tensor]) -> bool:
    return all(bool(weight.isfinite().all()) for weight in weights)


def check_skip(engine: str, **options: Any) -> None:
    """The bad step is left out on all ranks, and the run is the one that leaves it out by hand."""
    with run_of(engine, "skip", **options) as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights, skipped = run.train(), run.skipped
        expected_warnings = int(run.accelerator.is_main_process)
        counts = run.scheduler.scheduler.last_epoch
    assert skipped == [step == BAD for step in range(1, STEPS + 1)]
    texts = [str(one.message) for one in caught if "not finite" in str(one.message)]
    assert len(texts) == expected_warnings, texts
    with run_of(engine, None, **options) as run:
        expected = run.train(leave_out=True)
        assert counts == run.scheduler.scheduler.last_epoch
    assert all(map(torch.equal, weights, expected))


def check_stop(engine: str, in_batch: str, **options: Any) -> str:
    """All ranks raise one error before the bad step; returns its text."""
    with run_of(engine, "stop", **options) as run:
        with pytest.raises(FloatingPointError) as caught:
            run.train()
        text = str(caught.value)
        assert set(gather_object([text])) == {text}
    assert f"step {BAD} of this run (epoch 0, {in_batch})" in text
    return text


def check_engine(engine: str, *gradients: str) -> None:
    """All that holds for every engine.

    Args:
        engine: A key of `ENGINES`.
        gradients: Names of gradients of which one rank may hold a NaN that no other rank sees in its own.
    """
    check_skip(engine, clips=True)
    check_skip(engine, clips=False, num_steps=2)
    for clips in (True, False):
        for name in gradients:
            check_skip(engine, clips=clips, in_gradient_of=name)
    assert "The loss is nan in batch 4" in check_stop(engine, "batches 4 to 5", clips=True, num_steps=2)


def test_one_process() -> None:
    check_engine("single", ".")
    text = check_stop("single", "batch 2", clips=True, in_gradient_of="norm")
    assert "in optimizer step 3 of this run (epoch 0, batch 2): blocks.0.norm1.weight. Look at this batch" in text


def test_warn_steps_and_patience_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        run_of("single", "warn", clips=True, bad=(STEPS,)) as run,
        pytest.warns(UserWarning, match=r"step 6.*The step is taken\.$"),
    ):
        assert not is_finite(run.train())
    assert run.skipped == [False] * STEPS
    with (
        run_of("single", "skip", clips=False, bad=(1, 3, 4), patience=2) as run,
        pytest.warns(UserWarning, match="The step is left out"),
        pytest.raises(
            FloatingPointError, match=r"step 4 of this run.* not in 2 steps in a row, which is the patience"
        ),
    ):
        run.train()
    monkeypatch.setattr(finite_gradients, "MAX_WARNINGS", 2)
    with (
        run_of("single", "skip", clips=False, bad=(1, 2, 3, 4)) as run,
        pytest.warns(UserWarning, match="not finite") as caught,
    ):
        run.train()
    assert [str(one.message).endswith("Later ones are not reported.") for one in caught] == [False, True]


@ranks(2)
def test_ddp(rank: int, world: int) -> None:
    check_engine("ddp")
    text = check_stop("ddp", "batch 2", clips=True)
    assert "more on all 2 ranks. The loss is nan in batch 2 on rank 1." in text


@ranks(2)
def test_fsdp_2(rank: int, world: int) -> None:
    check_engine("fsdp2-full", ".")
    text = check_stop("fsdp2-full", "batch 2", clips=True, in_gradient_of="norm2")
    assert "blocks.0.norm2.weight on rank 1. Look" in text


@ranks(2)
def test_fsdp_1(rank: int, world: int) -> None:
    check_engine("fsdp1-full", ".")


@ranks(2)
def test_fsdp_1_with_flat_parameters(rank: int, world: int) -> None:
    check_engine("fsdp1-flat-full", ".")
    text = check_stop("fsdp1-flat-full", "batch 2", clips=False, in_gradient_of="blocks.1")
    assert re.search(r"batch 2\): blocks\.1\.[a-z0-9.]+ on rank 1\. Look", text)


@ranks(2)
def test_tensor_parallelism(rank: int, world: int) -> None:
    check_engine("tp", "query", "norm")  # a shard, and a replica that no collective touches


@ranks(2)
def test_pipeline(rank: int, world: int) -> None:
    check_engine("pp", ".")


@ranks(4)
def test_meshes_of_two_dimensions(rank: int, world: int) -> None:
    for engine in ("hsdp", "fsdp2+tp", "ddp+pp", "fsdp2+pp"):
        check_skip(engine, clips=True)
        check_skip(engine, clips=False)


# ---- what is particular -------------------------------------------------------------------------------------------------


def two_optimizers(accelerator: Accelerator) -> tuple[Any, ...]:
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    return accelerator.prepare(*models, *optimizers)


def test_each_optimizer_by_itself_and_norms_for_one_step_only() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[FiniteGradientsKwargs(action="skip")])
    first, second, left, right = two_optimizers(accelerator)
    accelerator.backward(first(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(first.parameters(), 1.0)
    accelerator.backward(second(torch.full((1, 2), float("nan"))).sum())
    accelerator.clip_grad_norm_(second.parameters(), 1.0)
    left.step()
    with pytest.warns(
        UserWarning, match=r"outside of prepared loaders\): model 1: weight\. The loss is nan\. The step is left"
    ):
        right.step()
    assert [left.step_was_skipped, right.step_was_skipped] == [False, True]
    left.zero_grad()
    right.zero_grad()
    first(torch.ones(1, 2)).sum().backward()  # none of the norms is of this step
    left.step()
    first.weight.grad[0, 0] = float("nan")
    with pytest.warns(
        UserWarning, match=r"step 3 of this run \(outside of prepared loaders\): model 0: weight\. The step"
    ):
        left.step()
    assert left.step_was_skipped


def test_the_largest_element_is_no_answer_and_large_gradients_are_finite() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[FiniteGradientsKwargs(action="stop")])
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    accelerator.backward(model(torch.ones(1, 2)).sum() * 1e30)  # whose squares overflow
    optimizer.step()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(FloatingPointError, match="their norm overflows"):
        optimizer.step()
    assert model.weight.grad.isfinite().all()
    model.bias.grad[0] = float("nan")
    accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    with pytest.raises(FloatingPointError, match=r"loaders\): bias\. "):
        optimizer.step()


def test_sparse_gradients() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[FiniteGradientsKwargs(action="stop")])
    model = nn.Embedding(4, 2, sparse=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.tensor([1])).sum())
    optimizer.step()
    accelerator.backward(model(torch.tensor([2])).sum() / 0)
    with pytest.raises(FloatingPointError, match="weight"):
        optimizer.step()


def test_the_loss_scaler_skips_and_patience_counts() -> None:
    handler = FiniteGradientsKwargs(action="skip", patience=2)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    inputs, bad = torch.ones(1, 2), torch.full((1, 2), float("nan"))
    before = model.weight.detach().clone()
    for batch, skipped in ((bad, True), (inputs, False), (bad, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.step_was_skipped is skipped
        assert any("not finite" in str(one.message) for one in caught) is skipped
    assert is_finite([model.weight])
    assert not torch.equal(model.weight, before)
    accelerator.backward(model(bad).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        optimizer.step()


@ranks(2)
def test_ranks_that_do_not_average_ask_one_another(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[FiniteGradientsKwargs(action="stop")])
    model, own = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([*model.parameters(), own], 0.1))
    inputs = torch.ones(1, 2)
    accelerator.backward(model(inputs).sum() * own)
    own.grad.fill_(float("nan") if rank else 1.0)
    accelerator.clip_grad_norm_([*model.parameters(), own], 1.0)
    with pytest.raises(FloatingPointError, match=r"parameter 2 of SGD on rank 1\."):
        optimizer.step()
    accelerator.free_memory()
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with LocalSGD(accelerator, model, 2) as local_sgd:
        for step in range(2):
            accelerator.backward(model(inputs * (float("nan") if rank and step else 1.0)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if step:
                with pytest.raises(FloatingPointError, match=r"\): weight on rank 1\. The loss is nan on rank 1\."):
                    optimizer.step()
            else:
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()


# ---- what is refused ----------------------------------------------------------------------------------------------------


def test_bad_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"action='halt' is not valid: expected one of 'stop', 'skip', 'warn'\."):
        FiniteGradientsKwargs(action="halt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"patience=0 is not valid: expected an integer of at least 1\."):
        FiniteGradientsKwargs(action="skip", patience=0)
    with pytest.raises(ValueError, match=r"patience=3 has no effect with action='stop'"):
        FiniteGradientsKwargs(patience=3)
    monkeypatch.setenv(VARIABLE, "maybe")
    with pytest.raises(
        ValueError, match=rf"{VARIABLE}='maybe' is not valid: expected one of 'stop', 'skip', 'warn'\."
    ):
        Accelerator(cpu=True)


def test_the_variable_stands_for_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, action in (("skip", "skip"), ("STOP", "stop"), ("", None), ("none", None)):
        monkeypatch.setenv(VARIABLE, value)
        handler = Accelerator(cpu=True).engine.context.handlers.finite_gradients
        assert (None if handler is None else handler.action) == action
        reset_state()
    monkeypatch.setenv(VARIABLE, "skip")
    assert FiniteGradientsKwargs(patience=2).action == "skip"
    handler = FiniteGradientsKwargs(action="warn")
    assert Accelerator(cpu=True, kwargs_handlers=[handler]).engine.context.handlers.finite_gradients is handler


def test_what_cannot_be_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = FiniteGradientsKwargs(action="stop")
    with pytest.raises(
        ValueError, match=r"action='stop'\) cannot be used with mixed_precision='fp16'.* Choose action='skip'"
    ):
        Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[stop])
    for engine in (DeepSpeedEngine, MegatronLMEngine, XlaEngine):
        monkeypatch.setattr(SingleEngine, "unguarded_because", engine.unguarded_because)
        with pytest.raises(ValueError, match=rf"'single' engine: {engine.unguarded_because}\. Leave it out\."):
            Accelerator(cpu=True, kwargs_handlers=[stop])
        monkeypatch.undo()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[stop])
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"cannot be used with SGD\.step\(closure\)"):
        optimizer.step(lambda: model(torch.ones(1, 2)).sum())
    with pytest.raises(ValueError, match="join_uneven_inputs"):
        accelerator.join_uneven_inputs([model])
    lomo = type("Lomo", (torch.optim.SGD,), {"__module__": "lomo_optim"})
    with pytest.raises(ValueError, match="cannot be used with Lomo, which updates parameters in the backward pass"):
        accelerator.prepare(lomo(nn.Linear(2, 1).parameters(), 0.1))
