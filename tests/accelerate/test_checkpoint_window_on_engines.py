"""Checkpoints inside a gradient accumulation window, under every engine that keeps its gradients where they can be read."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ops.modules import to_local
from accelerate.utils import GradientAccumulationPlugin
from tests.support.changed_engines import ENGINES, Run, fsdp_settings, run_of
from tests.support.ranks import ranks

WINDOW, BEFORE, AFTER = 4, 2, 6  # micro-batches: of a window, before the state is saved, and after it
NOT_KEPT = ("zero0", "zero1", "zero2", "zero3")
ON_TWO = [name for name, engine in ENGINES.items() if engine.world == 2 and name not in NOT_KEPT]
ON_FOUR = [name for name, engine in ENGINES.items() if engine.world == 4]


def settings(sync_each_batch: bool) -> dict[str, Any]:
    return {"gradient_accumulation_plugin": GradientAccumulationPlugin(WINDOW, sync_each_batch=sync_each_batch)}


def weights(run: Run) -> list[torch.Tensor]:
    return [to_local(one).detach().clone() for one in run.model.parameters()]


def save_inside(engine: str, folder: Path, **further: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Save inside a window; the losses and weights of the run that goes on."""
    with run_of(engine, 1, **further) as run:
        run.train(BEFORE)
        assert not run.accelerator.sync_gradients
        run.accelerator.save_state(folder)
        return run.train(AFTER), weights(run)


def go_on(engine: str, folder: Path, **further: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and weights of the run that resumes."""
    with run_of(engine, 1, seed=1, **further) as run:
        run.train(3)  # inside a window of its own, which the checkpoint's replaces
        run.accelerator.load_state(folder)
        assert not run.accelerator.sync_gradients
        run.step = BEFORE
        return run.train(AFTER), weights(run)


def check_same(engine: str, folder: Path, **further: Any) -> None:
    losses, expected = save_inside(engine, folder, **further)
    resumed, found = go_on(engine, folder, **further)
    assert resumed == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.takes_turns
@pytest.mark.sample(2)
@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("engine", ON_TWO)
@ranks(2)
def test_on_two_ranks(rank: int, world: int, engine: str, sync_each_batch: bool, tmp_path: Path) -> None:
    check_same(engine, tmp_path / "state", **settings(sync_each_batch))


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("engine", ON_FOUR)
@ranks(4)
def test_on_four_ranks(rank: int, world: int, engine: str, sync_each_batch: bool, tmp_path: Path) -> None:
    check_same(engine, tmp_path / "state", **settings(sync_each_batch))


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["fsdp1-full", "fsdp1-flat-full", "tp"])
@ranks(2)
def test_in_bf16(rank: int, world: int, engine: str, tmp_path: Path) -> None:
    check_same(engine, tmp_path / "state", mixed_precision="bf16", **settings(False))


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*NO_SHARD")
@pytest.mark.parametrize("flat", [False, True])
@ranks(2)
def test_strategies_of_fsdp1(rank: int, world: int, flat: bool, tmp_path: Path) -> None:
    for strategy in ("SHARD_GRAD_OP", "NO_SHARD"):
        further = fsdp_settings(1, "full", flat=flat, strategy=strategy)()
        check_same("ddp", tmp_path / strategy, **further, **settings(False))


@pytest.mark.takes_turns
@ranks(2)
def test_whole_gradients_fit_other_engines(rank: int, world: int, tmp_path: Path) -> None:
    for saver, loader in (
        ("ddp", "fsdp1-flat-full"),
        ("fsdp1-flat-full", "fsdp2-full"),
        ("fsdp1-full", "ddp"),
        ("fsdp2-full", "fsdp1-full"),
    ):
        losses, _ = save_inside(saver, tmp_path / f"{saver}-{loader}", **settings(False))
        assert go_on(loader, tmp_path / f"{saver}-{loader}", **settings(False))[0] == pytest.approx(losses, rel=1e-6)


@pytest.mark.takes_turns
@ranks(2)
def test_parts_of_gradients_fit_no_other_arrangement(rank: int, world: int, tmp_path: Path) -> None:
    save_inside("tp", tmp_path / "parts", **settings(False))
    save_inside("ddp", tmp_path / "whole", **settings(False))
    for loader, folder, message in (
        (
            "ddp",
            "parts",
            r"hold parts of its gradients \(engine=ddp, num_processes=2, tp=2\), which these \(engine=ddp, num_",
        ),
        ("tp", "whole", "the 'ddp' engine cannot load the gradients"),
    ):
        with run_of(loader, 1, seed=1, **settings(False)) as run:
            warnings.simplefilter("always")
            with warnings.catch_warnings(record=True) as heard:
                run.accelerator.load_state(tmp_path / folder)
            said = [str(each.message) for each in heard if "accumulation window" in str(each.message)]
            assert len(said) == (rank == 0)
            assert all(re.search(message, each) for each in said)
            assert run.accelerator.sync_gradients
            assert all(one.grad is None for one in run.model.parameters())
