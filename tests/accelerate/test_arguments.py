"""What the constructor makes of its arguments and of the launcher's variables, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from accel_integrations.engines.registry import ENGINES
from accel_state.accelerator_state import AcceleratorState
from accel_state.enums import DistributedType, DynamoBackend, FP8BackendType, RNGType
from accel_state.mesh import ParallelismConfig
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.compile import TorchDynamoPlugin
from accel_state.settings.data import DataLoaderConfiguration
from accel_state.settings.ddp import DistributedDataParallelKwargs
from accel_state.settings.deepspeed import DeepSpeedPlugin
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.handlers import AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs
from accel_state.settings.profile import ProfileKwargs
from accel_state.settings.project import ProjectConfiguration
from accelerate import Accelerator
from accelerate.accelerator import _split_batches
from accelerate.arguments import resolve_plugins
from tests.support.ranks import ranks


def test_defaults() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.device == torch.device("cpu")
    assert accelerator.mixed_precision == "no"
    assert accelerator.distributed_type is DistributedType.NO
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert not accelerator.use_distributed
    assert not accelerator.multi_device
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.sync_gradients
    assert accelerator.rng_types == ["generator"]
    assert (accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration) == (None, None, 0)
    assert accelerator.step_scheduler_with_optimizer
    assert accelerator.log_with == []
    assert accelerator.parallelism_config is None
    assert accelerator.torch_device_mesh is None
    assert not accelerator.is_fsdp2
    assert not accelerator.is_composable_parallelism_enabled
    assert accelerator.fp8_backend is FP8BackendType.NO
    assert accelerator.deepspeed_plugin is None
    assert accelerator.should_save_model
    assert accelerator.optimizer_step_was_skipped is False


def test_loader_settings_are_readable_and_even_batches_can_be_set() -> None:
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=False, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    assert accelerator.split_batches is True
    assert accelerator.dispatch_batches is False
    assert accelerator.use_seedable_sampler is True
    assert accelerator.non_blocking is False
    assert accelerator.use_stateful_dataloader is False
    accelerator.even_batches = False
    assert config.even_batches is False


def test_split_batches_as_an_argument_has_no_effect_and_says_so() -> None:
    with pytest.warns(FutureWarning, match=r"has no effect.*DataLoaderConfiguration\(split_batches=True\)"):
        accelerator = Accelerator(cpu=True, split_batches=True)
    assert accelerator.split_batches is False
    splits = DataLoaderConfiguration(split_batches=True)
    with pytest.warns(FutureWarning, match=r"split_batches=False\) has no effect"):
        assert Accelerator(cpu=True, split_batches=False, dataloader_config=splits).split_batches is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Accelerator(cpu=True, split_batches=True, dataloader_config=splits).split_batches is True
        assert Accelerator(cpu=True, split_batches=False).split_batches is False
        assert Accelerator(cpu=True, split_batches=_split_batches).split_batches is False


# ---- accumulation -------------------------------------------------------------------------------------------------------


def test_accumulation_steps_by_number_plugin_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator(cpu=True, gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    plugin = GradientAccumulationPlugin(num_steps=4)
    assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 4
    plugin = GradientAccumulationPlugin(sync_with_dataloader=False)
    assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 1
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert accelerator.gradient_accumulation_steps == 7
    accelerator.gradient_accumulation_steps = 2  # a program that sets it later has its way
    assert accelerator.gradient_accumulation_steps == 2
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    assert Accelerator(cpu=True, gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ValueError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS='many'"):
        Accelerator(cpu=True)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_accumulation_steps_are_counted_from_one(steps: Any) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps="):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="gradient_accumulation_steps="):
        accelerator.gradient_accumulation_steps = steps


def test_accumulation_is_said_once() -> None:
    with pytest.raises(ValueError, match="Pass only the plugin"):
        Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        )


# ---- handlers, compilation, project, generators -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nccl", "gloo", None])
@pytest.mark.parametrize("minutes", [10, 30, 45])  # 10 and 30 are defaults of torch's backends
def test_a_timeout_that_is_given_is_in_force(backend: str | None, minutes: int) -> None:
    asked = InitProcessGroupKwargs(backend=backend, timeout=timedelta(minutes=minutes))
    for handler in (asked, copy.deepcopy(asked)):
        assert handler.to_kwargs()["timeout"] == timedelta(minutes=minutes)
    assert "timeout" not in InitProcessGroupKwargs().to_kwargs()


def test_handlers_reach_their_attributes() -> None:
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=True),
        GradScalerKwargs(init_scale=8.0),
        InitProcessGroupKwargs(timeout=timedelta(seconds=30)),
        AutocastKwargs(cache_enabled=False),
        ProfileKwargs(record_shapes=True),
    ]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    assert [
        accelerator.ddp_handler,
        accelerator.scaler_handler,
        accelerator.init_handler,
        accelerator.autocast_handler,
        accelerator.profile_handler,
    ] == handlers


def test_a_single_handler_needs_no_list() -> None:
    handler = GradScalerKwargs(init_scale=8.0)
    assert Accelerator(cpu=True, kwargs_handlers=handler).scaler_handler is handler  # type: ignore[arg-type]


def test_handlers_are_given_once_and_are_handlers() -> None:
    with pytest.raises(ValueError, match="at most one GradScalerKwargs"):
        Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs(), GradScalerKwargs()])
    with pytest.raises(ValueError, match=r"kwargs_handlers\[0\]=3"):
        Accelerator(cpu=True, kwargs_handlers=[3])  # type: ignore[list-item]


def test_compilation_by_backend_or_plugin() -> None:
    assert Accelerator(cpu=True, dynamo_backend="eager").state.dynamo_plugin.backend is DynamoBackend.EAGER
    AcceleratorState._reset_state(True)
    plugin = TorchDynamoPlugin(backend="aot_eager")
    assert Accelerator(cpu=True, dynamo_plugin=plugin).state.dynamo_plugin is plugin
    with pytest.raises(ValueError, match="Pass only the plugin"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=plugin)
    with pytest.raises(ValueError, match="(?i)backend='egaer'.*Did you mean 'eager'"):
        Accelerator(cpu=True, dynamo_backend="egaer")


def test_project_folders(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, tmp_path)
    config = ProjectConfiguration(logging_dir="logs", iteration=3)
    accelerator = Accelerator(cpu=True, project_dir="run", project_config=config)
    assert (accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration) == ("run", "logs", 3)
    with pytest.warns(UserWarning, match="project_dir='b' has no effect"):
        accelerator = Accelerator(cpu=True, project_dir="b", project_config=ProjectConfiguration("a"))
    assert accelerator.project_dir == "a"


def test_random_generators() -> None:
    assert Accelerator(cpu=True, rng_types=["torch", RNGType.GENERATOR]).rng_types == ["torch", RNGType.GENERATOR]
    assert Accelerator(cpu=True, rng_types="torch").rng_types == ["torch"]
    with pytest.raises(ValueError, match=r"'numpy' is not one of 'torch'"):
        Accelerator(cpu=True, rng_types=["numpy"])


@pytest.mark.parametrize(
    "argument",
    ["dataloader_config", "gradient_accumulation_plugin", "dynamo_plugin", "project_config", "parallelism_config",
     "fsdp_plugin"],
)  # fmt: skip
def test_an_object_of_the_wrong_class_is_named(argument: str) -> None:
    with pytest.raises(TypeError, match=rf"{argument}=3 is of type int. Pass an object of "):
        Accelerator(cpu=True, **{argument: 3})  # type: ignore[arg-type]


# ---- precision and several accelerators ---------------------------------------------------------------------------------


def test_mixed_precision_by_argument_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.native_amp
    assert accelerator.scaler is None


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="fp12"):
        Accelerator(cpu=True, mixed_precision="fp12")


def test_accelerators_share_the_state() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    second = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert vars(first.state) is vars(second.state)
    assert first.gradient_accumulation_steps == second.gradient_accumulation_steps == 3
    first.prepare(torch.nn.Linear(1, 1))
    assert second._models == []


def test_a_second_accelerator_cannot_change_the_precision() -> None:
    Accelerator(cpu=True)
    Accelerator(cpu=True, mixed_precision="no")
    with pytest.raises(ValueError, match="bf16"):
        Accelerator(cpu=True, mixed_precision="bf16")


def test_a_refused_argument_starts_nothing() -> None:
    with pytest.raises(ValueError, match="rng_types"):
        Accelerator(cpu=True, mixed_precision="bf16", rng_types=["nothing"])
    assert Accelerator(cpu=True).mixed_precision == "no"


def test_a_plugin_for_several_processes_has_no_effect_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.warns(UserWarning, match="megatron_lm_plugin has no effect: it needs several processes"):
        assert Accelerator(cpu=True).distributed_type == DistributedType.NO


def test_axes_that_need_another_engine_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tp_size=2 = 2 processes, but the run has 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


@ranks(2)
def test_a_way_of_training_without_an_engine_leaves_no_state_behind(rank: int, world: int) -> None:
    class Plugin(FullyShardedDataParallelPlugin):
        distributed_type = DistributedType.XLA

    unknown = patch.dict(ENGINES, {"XLA": None})
    with unknown, pytest.raises(NotImplementedError, match="'XLA' is not known"):
        Accelerator(fsdp_plugin=Plugin())
    assert Accelerator().distributed_type is DistributedType.MULTI_CPU


@ranks(2)
def test_two_processes(rank: int, world: int) -> None:
    accelerator = Accelerator()
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    assert accelerator.use_distributed
    assert not accelerator.multi_device
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (2, rank, rank)
    assert accelerator.is_main_process is accelerator.should_save_model is (rank == 0)
    assert accelerator.is_last_process is (rank == 1)


def test_several_deepspeed_plugins_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_state.libraries.is_deepspeed_available", lambda: True)
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    assert resolve_plugins({"deepspeed_plugin": plugins})["deepspeed_plugin"] == plugins
    with pytest.raises(TypeError, match=r"deepspeed_plugins\['teacher'\]=3 is of type int"):
        resolve_plugins({"deepspeed_plugin": {**plugins, "teacher": 3}})
    with pytest.raises(TypeError, match=r"fsdp_plugin=\{.*is of type dict"):
        resolve_plugins({"fsdp_plugin": plugins})
