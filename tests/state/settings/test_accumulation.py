"""Gradient accumulation settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accel_state.settings.accumulation import GradientAccumulationPlugin


def test_defaults_average_over_steps() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4)
    assert vars(plugin) == {
        "num_steps": 4,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
        "average_over": "steps",
    }
    assert plugin.to_kwargs() == {"num_steps": 4}
    assert GradientAccumulationPlugin().num_steps is None


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert GradientAccumulationPlugin(num_steps=np.int64(2)).num_steps == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("num_steps", [0, -1, 2.5, True, "two"])
def test_the_number_of_steps_is_a_whole_number_from_one_on(num_steps: Any) -> None:
    with pytest.raises(ValueError, match="GradientAccumulationPlugin.num_steps=.* at least 1"):
        GradientAccumulationPlugin(num_steps=num_steps)


def test_a_misspelt_average_is_refused() -> None:
    with pytest.raises(ValueError, match=r"average_over='weight'.*Did you mean 'weights'\?"):
        GradientAccumulationPlugin(average_over="weight")  # type: ignore[arg-type]
