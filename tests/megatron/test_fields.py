"""No field of the plugin is left out without a word."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from accel_integrations.megatron.fields import LEFT_OUT, WITHOUT_EFFECT, check_fields
from accel_integrations.megatron.placeholders import MegatronLMDummyScheduler
from accel_integrations.megatron.prepared import make_scheduler
from accel_state.settings.megatron import MegatronLMPlugin

OF_ANOTHER_KIND = {
    "weight_decay_incr_style": "cosine", "consumed_samples": [8], "tensorboard_dir": "runs", "start_weight_decay": 0.1,
    "end_weight_decay": 0.1, "lr_decay_samples": 9, "pipeline_model_parallel_split_rank": 1,
    "no_wd_decay_cond": len, "scale_lr_cond": len,
}  # fmt: skip


def test_what_would_train_otherwise_is_refused() -> None:
    check_fields(MegatronLMPlugin())
    for name, instead in LEFT_OUT.items():
        plugin = MegatronLMPlugin()
        setattr(plugin, name, OF_ANOTHER_KIND.get(name, True))
        with pytest.raises(NotImplementedError, match=f"{name}=") as raised:
            check_fields(plugin)
        assert instead in str(raised.value)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_trains_the_same_is_only_warned_about(name: str) -> None:
    plugin = MegatronLMPlugin()
    setattr(plugin, name, OF_ANOTHER_KIND.get(name, True))
    with pytest.warns(UserWarning, match=f"{name}=.* has no effect"):
        check_fields(plugin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fields(plugin, warn=False)


def rates(warmup_num_steps: int = 0, **fields: Any) -> list[float]:
    """The learning rates of eleven steps of one process."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plugin = MegatronLMPlugin(**fields)
    plugin.set_training_args(micro_batch_size=1, dp_degree=1)
    dummy = MegatronLMDummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=warmup_num_steps)
    scheduler = make_scheduler(dummy, optimizer, plugin, count=1)
    found = []
    for _ in range(11):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_the_warmup_can_be_a_fraction_of_the_decay() -> None:
    assert rates(lr_warmup_fraction=0.4) == pytest.approx(rates(warmup_num_steps=4))
    quarter = rates(lr_warmup_fraction=0.25)
    assert quarter[:3] == pytest.approx([0.0, 1 / 2.5, 2 / 2.5])
    assert quarter[3:5] == pytest.approx([1 - 0.5 / 7.5, 1 - 1.5 / 7.5])
    assert rates(lr_warmup_fraction=0.0) == pytest.approx(rates())
    with pytest.raises(ValueError, match="lr_warmup_fraction=0.25 and 4 warmup steps cannot be combined"):
        rates(warmup_num_steps=4, lr_warmup_fraction=0.25)
