"""What happens when a gradient is not finite, with every engine: the same on all ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_ops.modules import to_local
from accelerate import Accelerator, finite_gradients
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
