"""float16 under Megatron-LM: losses are scaled, steps whose gradients overflow are skipped by all ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.utils import GradScalerKwargs, MegatronLMPlugin
from tests.megatron.training import megatron_ranks, new_model, new_rows, run_with, start, train

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")

BATCH = 4
TOO_LARGE = 2.0**24
"""A scale with which gradients do not fit into float16: some halvings later they do."""


def settings(scale: float) -> dict[str, Any]:
    return {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=scale, growth_interval=3)]}


@megatron_ranks(2)
def test_steps_that_overflow_are_skipped(rank: int, world: int) -> None:
    layouts = (
        ({"tp_degree": 2}, BATCH),
        ({"pp_degree": 2, "num_micro_batches": 2}, BATCH // 2),  # one rank has the loss, and the scale
        ({"use_distributed_optimizer": True}, BATCH // 2),
    )
    for layout, micro_batch in layouts:
        with run_with(MegatronLMPlugin(**layout), **settings(TOO_LARGE)) as accelerator:
            rows = new_rows(BATCH)
            model, optimizer, loader, scheduler = start(accelerator, new_model(), rows, micro_batch, decay=True)
            scaler = accelerator.scaler
            assert scaler is not None
            skipped, norms, batch = [], [], next(iter(loader))
            for _ in range(20):
                before = {name: one.detach().clone() for name, one in model.named_parameters()}
                rate, scale = optimizer.param_groups[0]["lr"], scaler.get_scale() if norms else TOO_LARGE
                loss = model(**batch).loss
                accelerator.backward(loss)
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))  # type: ignore[arg-type]
                optimizer.step()
                scheduler.step()
                skipped.append(accelerator.optimizer_step_was_skipped)
                assert 0 < loss.item() < 100
                same = all(torch.equal(one, before[name]) for name, one in model.named_parameters())
                assert same == skipped[-1], layout
                assert (optimizer.param_groups[0]["lr"] == rate) == skipped[-1], layout
                if skipped[-1]:
                    assert scaler.get_scale() == scale / 2
            assert skipped[0]
            assert not all(skipped)
            assert scaler.get_scale() < TOO_LARGE
            assert all((norm < 1000) != was_skipped for norm, was_skipped in zip(norms, skipped, strict=True))


@megatron_ranks(2)
def test_the_scale_resumes(rank: int, world: int, tmp_path: Path) -> None:
    def run(plugin: MegatronLMPlugin, micro_batch: int, scale: float, load: bool) -> list[tuple[float, float]]:
        with run_with(plugin, **settings(scale)) as accelerator:
            rows = new_rows(4 * BATCH)
            parts = start(accelerator, new_model(), rows, micro_batch, decay=False)
            if load:
                accelerator.load_state(tmp_path / "state")
            else:
                train(accelerator, *parts)
                accelerator.save_state(tmp_path / "state")
            assert accelerator.scaler is not None
            assert accelerator.scaler.get_scale() == 2.0**11  # after four steps: it grew once
            assert accelerator.scaler.state_dict()["_growth_tracker"] == 1
            return train(accelerator, *parts)

    went_on = run(MegatronLMPlugin(tp_degree=2), BATCH, 2.0**10, load=False)
    assert run(MegatronLMPlugin(tp_degree=2), BATCH, 1.0, load=True) == went_on
    elsewhere = run(MegatronLMPlugin(pp_degree=2, num_micro_batches=2), BATCH // 2, 1.0, load=True)
    assert [loss for loss, _ in elsewhere] == pytest.approx([loss for loss, _ in went_on], rel=2e-3)


@megatron_ranks(2)
def test_a_scaler_of_the_program_is_used(rank: int, world: int) -> None:
    with run_with(MegatronLMPlugin(tp_degree=2), mixed_precision="bf16") as accelerator:
        parts = start(accelerator, new_model(), new_rows(2 * BATCH), BATCH)
        assert accelerator.scaler is None
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        train(accelerator, *parts)
        assert accelerator.scaler.get_scale() == 16.0
