"""Settings: the fields of accelerate 1.15, in their order and with their types; the small ones in full."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_state.enums import DynamoBackend
from accel_state.mesh import ParallelismConfig
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.compile import TorchDynamoPlugin
from accel_state.settings.data import DataLoaderConfiguration
from accel_state.settings.deepspeed import DeepSpeedPlugin
from accel_state.settings.megatron import MegatronLMPlugin
from accel_state.settings.project import ProjectConfiguration

FIELDS = json.loads((Path(__file__).parent / "facts" / "fields.json").read_text())


@pytest.mark.parametrize("where", FIELDS)
def test_fields_and_their_order(where: str) -> None:
    module, _, name = where.partition(":")
    actual = list(inspect.signature(getattr(import_module(f"accel_state.settings.{module}"), name)).parameters)
    assert actual[: len(FIELDS[where])] == FIELDS[where]


@pytest.mark.parametrize(
    "settings_class",
    [DeepSpeedPlugin, MegatronLMPlugin, ParallelismConfig, TorchDynamoPlugin],
)
def test_programs_that_build_command_lines_can_read_the_types(settings_class: type) -> None:
    hints = typing.get_type_hints(settings_class)
    assert {row.name for row in dataclasses.fields(settings_class)} <= set(hints)


# ---- data loaders, projects, accumulation ---------------------------------------------------------------------------


def test_defaults_and_what_is_passed_on() -> None:
    assert vars(DataLoaderConfiguration()) == {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
        "already_sharded": False,
    }
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
    assert GradientAccumulationPlugin(num_steps=np.int64(2)).num_steps == 2  # type: ignore[arg-type]


WRONG: dict[type, list[tuple[dict[str, Any], str]]] = {
    DataLoaderConfiguration: [
        ({"even_batches": 2}, "even_batches=2 .* true or false"),
        ({"dispatch_batches": "main"}, "dispatch_batches='main'"),
        ({"data_seed": 1.5}, "data_seed=1.5 .* integer"),
        ({"data_seed": 2**64}, "data_seed=18446744073709551616 .* integer from"),
    ],
    ProjectConfiguration: [
        ({"total_limit": 0}, "total_limit=0 .* at least 1"),
        ({"total_limit": -1}, "total_limit=-1"),
        ({"total_limit": 1.5}, "total_limit=1.5"),
        ({"iteration": -1}, "iteration=-1"),
        ({"project_dir": 3}, "project_dir=3 .* a path"),
        ({"automatic_checkpoint_naming": "perhaps"}, "automatic_checkpoint_naming='perhaps'"),
    ],
    GradientAccumulationPlugin: [
        *(({"num_steps": wrong}, "Plugin.num_steps=.* at least 1") for wrong in (0, -1, 2.5, True, "two")),
        ({"average_over": "weight"}, r"average_over='weight'.*Did you mean 'weights'\?"),
    ],
}


@pytest.mark.parametrize(("kind", "given", "message"), [(kind, *row) for kind, rows in WRONG.items() for row in rows])
def test_wrong_values_are_refused(kind: type, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**given)


def test_stateful_loaders_need_no_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_state.libraries.is_torchdata_stateful_dataloader_available", lambda: False)
    assert DataLoaderConfiguration(use_stateful_dataloader=True).use_stateful_dataloader


def test_logs_go_to_the_project_unless_told_otherwise() -> None:
    assert ProjectConfiguration("runs").logging_dir == "runs"
    assert ProjectConfiguration("runs", logging_dir="logs").logging_dir == "logs"
    assert ProjectConfiguration(Path("runs")).logging_dir == Path("runs")
    assert ProjectConfiguration().logging_dir is None
    config = ProjectConfiguration(automatic_checkpoint_naming=True)
    config.set_directories("runs")
    assert (config.project_dir, config.logging_dir) == ("runs", "runs")
    config.set_directories("others")
    assert (config.project_dir, config.logging_dir) == ("others", "runs")


# ---- torch.compile ------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_by_default() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert plugin.to_kwargs() == {}
    assert plugin.to_dict()["backend"] == "no"


def test_kwargs_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = TorchDynamoPlugin(backend="inductor", fullgraph=True, use_regional_compilation=True)  # type: ignore[arg-type]
    assert plugin.to_kwargs() == {"backend": "inductor", "fullgraph": True}
    assert TorchDynamoPlugin(backend=DynamoBackend.EAGER).to_kwargs() == {"backend": "eager"}
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "aot_eager", "dynamic": False}


def test_a_misspelt_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"backend='indctor'.*Did you mean 'inductor'\?"):
        TorchDynamoPlugin(backend="indctor")  # type: ignore[arg-type]
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eagr")
    with pytest.raises(ValueError, match=r"ACCELERATE_DYNAMO_BACKEND='eagr'.*Did you mean 'eager'\?"):
        TorchDynamoPlugin()
