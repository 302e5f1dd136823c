"""The DeepSpeed plugin."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from accel_state.enums import DistributedType
from accel_state.errors import MissingLibraryError
from accel_state.settings.deepspeed import DeepSpeedPlugin
from accel_state.settings.deepspeed_auto import HfDeepSpeedConfig

AUTO: dict[str, Any] = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto"},
    },
}


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "deepspeed"):
        monkeypatch.setattr(f"accel_state.libraries.is_{name}_available", lambda: False)


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any] | None]:
    """Stands for transformers and keeps the configurations it is told of; None where it is told to forget."""
    told: list[dict[str, Any] | None] = []
    package, integrations, deepspeed = (
        ModuleType(name)
        for name in ("transformers", "transformers.integrations", "transformers.integrations.deepspeed")
    )

    class TransformersConfig:
        def __init__(self, config: dict[str, Any]) -> None:
            told.append(config)

    integrations.HfDeepSpeedConfig = TransformersConfig  # type: ignore[attr-defined]
    deepspeed.unset_hf_deepspeed_config = lambda: told.append(None)  # type: ignore[attr-defined]
    deepspeed.is_deepspeed_zero3_enabled = lambda: bool(told and told[-1])  # type: ignore[attr-defined]
    for module in (package, integrations, deepspeed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for library in ("transformers", "deepspeed"):
        monkeypatch.setattr(f"accel_state.libraries.is_{library}_available", lambda: True)
    return told


def test_a_configuration_is_made_from_the_fields() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0, offload_optimizer_device="cpu")
    assert plugin.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
    }
    assert plugin.hf_ds_config.config is plugin.deepspeed_config
    assert (plugin.hf_ds_config.is_zero3(), plugin.hf_ds_config.is_offload()) == (True, True)
    assert plugin.zero3_init_flag
    assert plugin.distributed_type is DistributedType.DEEPSPEED
    assert "cpu" in plugin.works_on


def test_a_given_configuration_wins_over_the_fields() -> None:
    given = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4, "steps_per_print": 10}
    plugin = DeepSpeedPlugin(hf_ds_config=given, zero_stage=1, gradient_accumulation_steps=2)
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.zero3_init_flag) == (3, 4, True)
    assert plugin.deepspeed_config == {**given, "steps_per_print": float("inf")}  # as in accelerate 1.15
    assert plugin.config is plugin.deepspeed_config
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}, gradient_accumulation_steps=5)
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 5
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert plugin.hf_ds_config is config
    assert plugin.deepspeed_config is config.config


def test_auto_values_are_filled_from_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "2.0")
    plugin = DeepSpeedPlugin(hf_ds_config=deepcopy(AUTO), zero_stage=3, zero3_save_16bit_model=True)
    assert plugin.deepspeed_config == {
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 2.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "none", "nvme_path": "none"},
            "offload_param": {"device": "none"},
        },
        "steps_per_print": float("inf"),
    }
    assert plugin.hf_ds_config.is_zero3()


def test_the_launcher_names_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    assert DeepSpeedPlugin().zero_stage == 2
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    assert DeepSpeedPlugin().zero_stage == 1
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero_stage,mixed_precision")
    with pytest.raises(ValueError, match="^zero_stage, mixed_precision of the accelerate config"):
        DeepSpeedPlugin()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_stage": 4}, "zero_stage=4 .* from 0 to 3"),
        ({"offload_param_device": "gpu"}, r"offload_param_device='gpu'.*'none', 'cpu', 'nvme'"),
        ({"offload_optimizer_device": "nvme"}, "offload_optimizer_nvme_path='none' .* a folder"),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0"),
        ({"gradient_accumulation_steps": "twice"}, "gradient_accumulation_steps='twice' .* or 'auto'"),
        ({"hf_ds_config": {}}, "no section 'zero_optimization'"),
        ({"hf_ds_config": 3}, "DeepSpeed configuration 3 cannot be used"),
        ({"hf_ds_config": {"zero_optimization": 5}}, "no section 'zero_optimization'"),
        ({"hf_ds_config": {"zero_optimization": {"stage": 7}}}, "zero_optimization.stage=7 .*from 0 to 3"),
        ({"hf_ds_config": {"zero_optimization": {"stage": "3"}}}, "zero_optimization.stage='3' is not valid"),
        (
            {"hf_ds_config": {"zero_optimization": {"offload_optimizer": {"device": "disk"}}}},
            "zero_optimization.offload_optimizer.device='disk' .*'nvme'",
        ),
        (
            {"hf_ds_config": {"zero_optimization": {"stage": 2}, "gradient_clipping": "much"}},
            "DeepSpeed configuration: gradient_clipping='much' is not valid",
        ),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedPlugin(**given)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "at least 1, because offload_optimizer_device='cpu'"),
        ({"zero_stage": 1, "offload_optimizer_device": "nvme"}, "at least 2, because offload_optimizer_device='nvme'"),
        ({"zero_stage": 1, "offload_param_device": "nvme"}, "at least 3, because offload_param_device='nvme'"),
    ],
)
def test_what_no_stage_offloads_is_refused(settings: dict[str, Any], reason: str) -> None:
    paths = {f"offload_{part}_nvme_path": "/fast" for part in ("optimizer", "param")}
    with pytest.raises(ValueError, match=f"zero_stage.*{reason}"):
        DeepSpeedPlugin(**settings, **paths)
    sections = {
        key.removesuffix("_device"): {"device": value} for key, value in settings.items() if key.endswith("device")
    }
    with pytest.raises(ValueError, match=reason):
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": settings["zero_stage"], **sections}})


def test_stage_two_keeps_in_memory_what_was_to_go_to_nvme() -> None:
    pytest.importorskip("deepspeed")
    plugin = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="nvme", offload_optimizer_nvme_path="/fast")
    with pytest.warns(UserWarning, match="offload_optimizer_device='nvme' offloads .* CPU memory with zero_stage=2"):
        plugin.check()
    assert plugin.get_value("zero_optimization.offload_optimizer.nvme_path") == "/fast"
    assert plugin.get_value("zero_optimization.offload_param.nvme_path") is None


def test_sharded_building_belongs_to_stage_three() -> None:
    with pytest.warns(UserWarning, match="zero3_init_flag=True has no effect with zero_stage=2"):
        assert not DeepSpeedPlugin(zero3_init_flag=True).is_zero3_init_enabled()


def test_msamp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    assert DeepSpeedPlugin().deepspeed_config["msamp"] == {"enabled": True, "opt_level": "O1"}
    with pytest.raises(NotImplementedError, match="zero_stage to 0, 1 or 2"):
        DeepSpeedPlugin(zero_stage=3)


def test_the_program_fills_the_rest() -> None:
    config = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", "optimizer": {"params": {"lr": "auto"}}}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert plugin.is_auto("train_batch_size")
    assert not plugin.is_auto("nowhere.at.all")
    plugin.deepspeed_config_process("optimizer.", **{"optimizer.params.lr": 0.5})
    plugin.deepspeed_config_process(**{"train_batch_size": 8, "optimizer.params.lr": 0.5})
    assert plugin.get_value("optimizer.params.lr") == 0.5
    assert plugin.get_value("train_batch_size") == 8
    with pytest.raises(
        ValueError, match="does not match the training script:\n- train_batch_size: 8 .*, 16 in the training script"
    ):
        plugin.deepspeed_config_process(**{"train_batch_size": 16})
    plugin.deepspeed_config_process(must_match=False, **{"train_batch_size": 16})
    mismatches: list[str] = []
    plugin.deepspeed_config_process(mismatches=mismatches, config={"train_batch_size": 8}, train_batch_size=16)
    assert len(mismatches) == 1
    plugin.fill_match("train_batch_size", train_batch_size=16)


@pytest.mark.parametrize(
    ("precision", "sections", "wanted"),
    [
        ("fp16", {}, {"fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": False}}),
        ("bf16", {}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
        ("fp8", {}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
        ("no", {}, {"fp16": {"enabled": False}, "bf16": {"enabled": False}}),
        ("fp16", {"fp16": {"enabled": "auto"}}, {"fp16": {"enabled": True}, "bf16": {"enabled": False}}),
        (
            "fp16",
            {"fp16": {"loss_scale": 0}},
            {"fp16": {"loss_scale": 0, "enabled": True}, "bf16": {"enabled": False}},
        ),
        ("no", {"bf16": {"enabled": True}}, {"bf16": {"enabled": True}, "fp16": {"enabled": False}}),
    ],
)
def test_the_number_format_is_written_into_the_configuration(
    precision: str, sections: dict[str, Any], wanted: dict[str, Any]
) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, **sections})
    plugin.attach(SimpleNamespace(mixed_precision=precision))  # type: ignore[arg-type]
    assert {name: plugin.deepspeed_config[name] for name in ("fp16", "bf16")} == wanted


def test_contradicting_number_formats_are_refused() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}})
    with pytest.raises(ValueError, match="mixed_precision='fp16' contradicts bf16.enabled=true"):
        plugin.set_mixed_precision("fp16")
    with pytest.raises(ValueError, match=r"mixed_precision='bf6'.*Did you mean 'bf16'\?"):
        plugin.set_mixed_precision("bf6")


def test_transformers_is_told_sizes_it_can_check(transformers: list[dict[str, Any] | None]) -> None:
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugin.select(_from_accelerator_state=True)
    forgotten, told = transformers
    assert forgotten is None
    assert told is not None
    assert (told["train_micro_batch_size_per_gpu"], told["gradient_accumulation_steps"]) == (1, 1)
    assert "train_batch_size" not in told
    assert plugin.dschf is not None
    assert plugin.selected


def test_sharded_building_is_switched_for_a_block(transformers: list[dict[str, Any] | None]) -> None:
    plugin = DeepSpeedPlugin(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=True):
        assert transformers == []
    block = plugin.zero3_init_context_manager(enable=False)
    block.__enter__()
    assert not plugin.zero3_init_flag
    assert transformers == []
    assert not block.__exit__(KeyError, KeyError(), None)  # an error inside the block ends it just as well
    assert plugin.zero3_init_flag
    assert transformers[-1] is not None
    with plugin.zero3_init_context_manager(enable=False):
        assert transformers[-1] is None
    assert transformers[-1] is not None


@pytest.mark.usefixtures("without_libraries")
def test_missing_libraries_are_named() -> None:
    with pytest.raises(MissingLibraryError, match="transformers"):
        DeepSpeedPlugin(zero_stage=3).set_deepspeed_weakref()
    DeepSpeedPlugin().set_deepspeed_weakref()
    with pytest.raises(MissingLibraryError, match="deepspeed"):
        DeepSpeedPlugin(transformer_moe_cls_names="Linear").set_moe_leaf_modules(torch.nn.Linear(1, 1))


def test_expert_layers_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    utils = ModuleType("deepspeed.utils")
    utils.set_z3_leaf_modules = lambda model, classes: told.append(classes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    monkeypatch.setattr("accel_state.libraries.is_deepspeed_available", lambda: True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    DeepSpeedPlugin().set_moe_leaf_modules(model)
    assert told == []
    DeepSpeedPlugin(transformer_moe_cls_names="Linear, ReLU").set_moe_leaf_modules(model)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "ReLU")
    DeepSpeedPlugin().set_moe_leaf_modules(model)
    assert told == [[torch.nn.Linear, torch.nn.ReLU], [torch.nn.ReLU]]
    with pytest.raises(ValueError, match=r"'Linaer'.*Did you mean 'Linear'\?"):
        DeepSpeedPlugin(transformer_moe_cls_names="Linaer").set_moe_leaf_modules(model)


def test_a_plugin_is_selected_by_the_state_only() -> None:
    plugin = DeepSpeedPlugin()
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        plugin.select()
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        plugin.selected = True
    plugin.select(_from_accelerator_state=True)
    plugin._unselect()
    assert not plugin.selected
