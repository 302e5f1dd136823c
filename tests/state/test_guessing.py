"""Misspelt names are answered with the one that was meant."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from accel_state.guessing import closest, guess_arguments
from accel_state.mesh import ParallelismConfig
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.data import DataLoaderConfiguration
from accel_state.settings.deepspeed import DeepSpeedPlugin
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.handlers import AutocastKwargs, InitProcessGroupKwargs
from accel_state.settings.project import ProjectConfiguration
from accelerate import Accelerator


@pytest.mark.parametrize(
    ("cls", "written", "meant"),
    [
        (Accelerator, "mixed_precison", "mixed_precision"),
        (Accelerator, "gradient_acumulation_steps", "gradient_accumulation_steps"),
        (AutocastKwargs, "enable", "enabled"),
        (DataLoaderConfiguration, "split_batch", "split_batches"),
        (DeepSpeedPlugin, "zero_stag", "zero_stage"),
        (FullyShardedDataParallelPlugin, "fsdp_versoin", "fsdp_version"),
        (GradientAccumulationPlugin, "num_step", "num_steps"),
        (InitProcessGroupKwargs, "time_out", "timeout"),
        (ParallelismConfig, "tp_sise", "tp_size"),
        (ProjectConfiguration, "total_limits", "total_limit"),
    ],
)
def test_a_misspelt_argument(cls: type, written: str, meant: str) -> None:
    message = rf"unexpected keyword argument '{written}'. Did you mean '{meant}'\?"
    with pytest.raises(TypeError, match=message):
        cls(**{written: 1})
    assert meant in inspect.signature(cls).parameters, "the signature is that of the constructor"


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'qqq'$"):
        Accelerator(qqq=1)  # type: ignore[call-arg]

    def takes(name: int) -> None: ...

    @guess_arguments
    class Calls:
        def __init__(self, names: int) -> None:
            takes(names=names)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"takes\(\) got an unexpected keyword argument 'names'($|\. Did)"):
        Calls(names=1)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("bfloat16", "bf16"), ("float16", "fp16"), ("half", "fp16"), ("FP32", "no"), ("bf61", "bf16"), ("x", None)],
)
def test_number_formats_by_other_names(word: str, meant: Any) -> None:
    assert closest(word, ["no", "fp8", "fp16", "bf16"]) == meant
    if meant is not None:
        with pytest.raises(ValueError, match=f"{word}.*Did you mean '{meant}'"):
            Accelerator(mixed_precision=word)
