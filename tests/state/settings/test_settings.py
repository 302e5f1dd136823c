"""Settings: the fields of accelerate 1.15, read from arguments and environment, with errors that say what to do."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from accel_state.mesh import ParallelismConfig
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.compile import TorchDynamoPlugin
from accel_state.settings.ddp import DistributedDataParallelKwargs
from accel_state.settings.deepspeed import DeepSpeedPlugin
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.handlers import GradScalerKwargs, InitProcessGroupKwargs
from accel_state.settings.megatron import MegatronLMPlugin
from accel_state.settings.parallelism import TorchContextParallelConfig
from accel_state.settings.project import ProjectConfiguration

FIELDS = json.loads((Path(__file__).parent / "facts" / "fields.json").read_text())


@pytest.mark.parametrize("where", FIELDS)
def test_fields_and_their_order(where: str) -> None:
    module, _, name = where.partition(":")
    actual = list(inspect.signature(getattr(import_module(f"accel_state.settings.{module}"), name)).parameters)
    assert actual[: len(FIELDS[where])] == FIELDS[where]


def test_settings_load_no_torch() -> None:
    modules = sorted(
        {f"accel_state.settings.{where.partition(':')[0]}" for where in FIELDS} - {"accel_state.settings.fp8"}
    )
    program = f"import sys; [__import__(name) for name in {modules!r}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradientAccumulationPlugin(num_steps=0), ["num_steps", "0"]),
        (lambda: GradientAccumulationPlugin(average_over="tokens"), ["average_over", "tokens", "weights"]),  # type: ignore[arg-type]
        (lambda: TorchDynamoPlugin(backend="inductr"), ["inductr", "inductor"]),  # type: ignore[arg-type]
        (lambda: DistributedDataParallelKwargs(comm_hook="power"), ["power", "power_sgd"]),  # type: ignore[arg-type]
        (lambda: GradScalerKwargs(growth_factor=0.5), ["growth_factor", "0.5"]),
        (lambda: ProjectConfiguration(total_limit=0), ["total_limit", "0"]),
        (lambda: ParallelismConfig(tp_size=0), ["tp_size", "0"]),
        (lambda: TorchContextParallelConfig(cp_comm_strategy="both"), ["cp_comm_strategy", "both", "alltoall"]),
        (lambda: FullyShardedDataParallelPlugin(fsdp_version=3), ["fsdp_version", "3"]),
        (lambda: InitProcessGroupKwargs(timeout="soon"), ["timeout", "soon"]),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_name_key_value_and_remedy(make: Any, words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    text = str(caught.value)
    assert all(word.lower() in text.lower() for word in words), text


@pytest.mark.parametrize(
    "settings_class",
    [DeepSpeedPlugin, MegatronLMPlugin, ParallelismConfig, TorchDynamoPlugin],
)
def test_programs_that_build_command_lines_can_read_the_types(settings_class: type) -> None:
    hints = typing.get_type_hints(settings_class)
    assert {row.name for row in dataclasses.fields(settings_class)} <= set(hints)
