"""The FSDP plugin: words into torch's objects, for both implementations."""

from __future__ import annotations

import dataclasses
import functools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_state.enums import DistributedType
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel_state.settings.fsdp_torch import get_module_class_from_name, materialize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Model(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())


def state(mixed_precision: str = "no", device: str = "cuda") -> Any:
    return SimpleNamespace(mixed_precision=mixed_precision, device=torch.device(device))


DEFAULTS_1: dict[str, Any] = {
    "fsdp_version": 1,
    "sharding_strategy": ShardingStrategy.FULL_SHARD,
    "reshard_after_forward": None,
    "backward_prefetch": None,
    "mixed_precision_policy": None,
    "auto_wrap_policy": None,
    "cpu_offload": CPUOffload(offload_params=False),
    "ignored_modules": None,
    "state_dict_type": StateDictType.FULL_STATE_DICT,
    "state_dict_config": FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
    "optim_state_dict_config": FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    "limit_all_gathers": True,
    "use_orig_params": False,
    "param_init_fn": None,
    "sync_module_states": False,
    "forward_prefetch": False,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "cpu_ram_efficient_loading": False,
    "transformer_cls_names_to_wrap": None,
    "min_num_params": None,
}
DEFAULTS_2 = DEFAULTS_1 | {
    "fsdp_version": 2,
    "sharding_strategy": None,
    "reshard_after_forward": True,
    "cpu_offload": OffloadPolicy(),
    "state_dict_type": StateDictType.SHARDED_STATE_DICT,
    "state_dict_config": ShardedStateDictConfig(offload_to_cpu=True),
    "optim_state_dict_config": ShardedOptimStateDictConfig(offload_to_cpu=True),
    "use_orig_params": None,
    "sync_module_states": None,
    "forward_prefetch": None,
}


def fields_of(plugin: Plugin) -> dict[str, Any]:
    return {name: getattr(plugin, name) for name in DEFAULTS_1}


def test_defaults() -> None:
    assert fields_of(Plugin()) == DEFAULTS_1
    assert fields_of(Plugin(fsdp_version=2)) == DEFAULTS_2
    assert Plugin.distributed_type is DistributedType.FSDP
    assert "cpu" in Plugin.works_on


SHARDED = {
    "state_dict_type": StateDictType.SHARDED_STATE_DICT,
    "state_dict_config": ShardedStateDictConfig(offload_to_cpu=True),
    "optim_state_dict_config": ShardedOptimStateDictConfig(offload_to_cpu=True),
}
FULL = {name: DEFAULTS_1[name] for name in SHARDED}


@pytest.mark.parametrize(
    ("version", "variable", "text", "changes"),
    [
        ("1", "SHARDING_STRATEGY", "shard_grad_op", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
        ("1", "SHARDING_STRATEGY", "3", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        ("1", "SHARDING_STRATEGY", "HYBRID_SHARD_ZERO2", {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}),
        ("1", "RESHARD_AFTER_FORWARD", "true", {}),
        ("1", "RESHARD_AFTER_FORWARD", "NO_SHARD", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        ("1", "BACKWARD_PREFETCH", "BACKWARD_PRE", {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}),
        ("1", "BACKWARD_PREFETCH", "NO_PREFETCH", {}),
        ("1", "FORWARD_PREFETCH", "true", {"forward_prefetch": True}),
        ("1", "USE_ORIG_PARAMS", "true", {"use_orig_params": True}),
        ("1", "OFFLOAD_PARAMS", "true", {"cpu_offload": CPUOffload(offload_params=True)}),
        ("1", "STATE_DICT_TYPE", "SHARDED_STATE_DICT", SHARDED),
        (
            "1",
            "STATE_DICT_TYPE",
            "LOCAL_STATE_DICT",
            {
                "state_dict_type": StateDictType.LOCAL_STATE_DICT,
                "state_dict_config": None,
                "optim_state_dict_config": None,
            },
        ),
        ("1", "AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP", {"auto_wrap_policy": transformer_auto_wrap_policy}),
        (
            "1",
            "AUTO_WRAP_POLICY",
            "size_based_wrap",
            {"auto_wrap_policy": size_based_auto_wrap_policy, "min_num_params": 0},
        ),
        ("1", "AUTO_WRAP_POLICY", "NO_WRAP", {}),
        ("1", "MIN_NUM_PARAMS", "100", {}),
        ("1", "TRANSFORMER_CLS_TO_WRAP", "Block", {}),
        ("1", "IGNORED_MODULES", "head.*", {"ignored_modules": "head.*"}),
        ("1", "ACTIVATION_CHECKPOINTING", "true", {"activation_checkpointing": True}),
        ("2", "RESHARD_AFTER_FORWARD", "false", {"reshard_after_forward": False}),
        ("2", "SHARDING_STRATEGY", "NO_SHARD", {}),
        ("2", "BACKWARD_PREFETCH", "BACKWARD_PRE", {}),
        ("2", "USE_ORIG_PARAMS", "true", {}),
        ("2", "SYNC_MODULE_STATES", "true", {}),
        ("2", "FORWARD_PREFETCH", "true", {}),
        ("2", "OFFLOAD_PARAMS", "1", {"cpu_offload": CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())}),
        ("2", "STATE_DICT_TYPE", "FULL_STATE_DICT", FULL),
        ("2", "ACTIVATION_CHECKPOINTING", "yes", {"activation_checkpointing": True}),
        ("2", "CPU_RAM_EFFICIENT_LOADING", "true", {"cpu_ram_efficient_loading": True}),
    ],
)
def test_variables(
    monkeypatch: pytest.MonkeyPatch, version: str, variable: str, text: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("FSDP_VERSION", version)
    monkeypatch.setenv(f"FSDP_{variable}", text)
    assert fields_of(Plugin()) == (DEFAULTS_1 if version == "1" else DEFAULTS_2) | changes


def test_wrapping_takes_its_variables_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block, Linear")
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "77")
    assert Plugin(auto_wrap_policy="transformer_based_wrap").transformer_cls_names_to_wrap == ["Block", "Linear"]
    assert Plugin(auto_wrap_policy="size_based_wrap").min_num_params == 77
    assert Plugin(transformer_cls_names_to_wrap=["Other"]).transformer_cls_names_to_wrap == ["Other"]


def test_code_wins_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    monkeypatch.setenv("FSDP_USE_ORIG_PARAMS", "true")
    plugin = Plugin(sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=False)
    assert (plugin.sharding_strategy, plugin.use_orig_params) == (ShardingStrategy.HYBRID_SHARD, False)
    assert Plugin(reshard_after_forward="SHARD_GRAD_OP").sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL")
    with pytest.raises(ValueError, match=r"FSDP_STATE_DICT_TYPE='FULL'"):
        Plugin()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fsdp_version": 3}, "fsdp_version=3 .* 1 or 2"),
        ({"sharding_strategy": "FULL_SHRAD"}, r"'FULL_SHRAD'.*Did you mean 'FULL_SHARD'\?"),
        ({"reshard_after_forward": True}, "reshard_after_forward=True .* 'FULL_SHARD'"),
        ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "reshard_after_forward='FULL_SHARD' .* true"),
        ({"fsdp_version": 2, "forward_prefetch": True}, "forward_prefetch=True .* fsdp_version=1"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "'LOCAL_STATE_DICT' .* fsdp_version=2"),
        ({"backward_prefetch": "BEFORE"}, "backward_prefetch='BEFORE'"),
        ({"auto_wrap_policy": "size_wrap"}, "auto_wrap_policy='size_wrap'"),
        ({"auto_wrap_policy": 3}, "auto_wrap_policy=3"),
        ({"state_dict_type": "SHARDED"}, "state_dict_type='SHARDED'"),
        ({"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, "CPUOffload with fsdp_version=1"),
        ({"fsdp_version": 2, "cpu_offload": CPUOffload()}, "OffloadPolicy with fsdp_version=2"),
        ({"mixed_precision_policy": "bf-16"}, r"'bf-16'.*Did you mean 'bf16'\?"),
        ({"mixed_precision_policy": {"param": "bf16"}}, r"'param'.*Did you mean 'param_dtype'\?"),
        ({"mixed_precision_policy": {"param_dtype": "x"}}, r"mixed_precision_policy\['param_dtype'\]='x'"),
        ({"mixed_precision_policy": MixedPrecisionPolicy()}, "MixedPrecision with fsdp_version=1"),
        ({"fsdp_version": 2, "mixed_precision_policy": MixedPrecision()}, "MixedPrecisionPolicy with fsdp_version=2"),
        ({"activation_checkpointing_offload": True}, "together with activation_checkpointing=True"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_offload": True},
            "together with fsdp_version=2",
        ),
        ({"min_num_params": -1, "auto_wrap_policy": "size_based_wrap"}, "min_num_params=-1"),
        ({"use_orig_params": "perhaps"}, "use_orig_params='perhaps'"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plugin(**given)


def test_settings_of_version_1_are_pointed_out_in_version_2() -> None:
    with pytest.warns(UserWarning, match="use_orig_params=True has no effect with fsdp_version=2"):
        assert Plugin(fsdp_version=2, use_orig_params=True).use_orig_params is None
    with pytest.warns(UserWarning, match="Use reshard_after_forward"):
        plugin = Plugin(fsdp_version=2, sharding_strategy="SHARD_GRAD_OP")
    assert (plugin.sharding_strategy, plugin.reshard_after_forward) == (None, False)


def test_loading_on_rank_0_sends_its_values() -> None:
    plugin = Plugin(cpu_ram_efficient_loading=True)
    assert plugin.sync_module_states
    assert plugin.param_init_fn is materialize
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    with pytest.warns(
        UserWarning, match="sync_module_states=False cannot be combined with cpu_ram_efficient_loading=True"
    ):
        assert Plugin(cpu_ram_efficient_loading=True, sync_module_states=False).sync_module_states
    assert Plugin(sync_module_states=True, param_init_fn=nn.Module.eval).param_init_fn is nn.Module.eval  # type: ignore[arg-type]
    with torch.device("meta"):
        linear = nn.Linear(2, 2)
    materialize(linear)
    assert linear.weight.device.type != "meta"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", torch.bfloat16), ("fp32", torch.float32)],
)
def test_mixed_precision_by_word(precision: str, dtype: torch.dtype) -> None:
    one, two = Plugin(), Plugin(fsdp_version=2)
    for plugin in (one, two):
        plugin.set_mixed_precision(precision)
    assert one.mixed_precision_policy == MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    assert two.mixed_precision_policy == MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype
    )


def test_mixed_precision_in_detail() -> None:
    plugin = Plugin(mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": torch.float32})
    assert plugin.mixed_precision_policy == MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin.set_mixed_precision("fp16")  # one that is there stays
    assert plugin.mixed_precision_policy == MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin.set_mixed_precision(torch.float16, buffer_autocast=True, override=True)
    assert plugin.mixed_precision_policy == MixedPrecision(
        param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float32
    )
    own = MixedPrecisionPolicy(output_dtype=torch.float32)
    assert Plugin(fsdp_version=2, mixed_precision_policy=own).mixed_precision_policy is own


def test_offloading_by_truth_value() -> None:
    assert Plugin(cpu_offload=True).cpu_offload == CPUOffload(offload_params=True)
    assert Plugin(cpu_offload=CPUOffload(True)).cpu_offload == CPUOffload(offload_params=True)
    assert isinstance(Plugin(fsdp_version=2, cpu_offload=True).cpu_offload, CPUOffloadPolicy)


@pytest.mark.filterwarnings("ignore:.*is not used")
def test_the_run_hands_over_its_number_format_and_state_dicts_on_the_cpu_stay_there() -> None:
    plugin = Plugin()
    plugin.attach(state())
    assert plugin.mixed_precision_policy is None
    plugin.attach(state("bf16"))
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16  # type: ignore[union-attr]
    assert plugin.state_dict_config.offload_to_cpu  # type: ignore[union-attr]
    plugin = Plugin()
    plugin.attach(state(device="cpu"))
    assert not plugin.state_dict_config.offload_to_cpu  # type: ignore[union-attr]
    assert not plugin.optim_state_dict_config.offload_to_cpu  # type: ignore[union-attr]
    plugin = Plugin(state_dict_config=FullStateDictConfig(offload_to_cpu=True))
    plugin.attach(state(device="cpu"))
    assert plugin.state_dict_config.offload_to_cpu  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*is not used")
def test_the_form_of_state_dicts_can_change() -> None:
    plugin = Plugin()
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert {name: getattr(plugin, name) for name in SHARDED} == SHARDED
    plugin.set_state_dict_type(StateDictType.LOCAL_STATE_DICT)
    assert plugin.state_dict_config is None
    plugin.set_state_dict_type("1")
    assert {name: getattr(plugin, name) for name in FULL} == FULL
    mine = FullStateDictConfig(offload_to_cpu=False)
    plugin = Plugin(state_dict_config=mine)
    plugin.set_state_dict_type("full_state_dict")
    assert plugin.state_dict_config is mine


def test_block_classes_come_from_the_model_or_by_name() -> None:
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(Model())
    assert isinstance(plugin.auto_wrap_policy, functools.partial)
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}
    settled = plugin.auto_wrap_policy
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy is settled
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Linear,Block")  # type: ignore[arg-type]
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block, nn.Linear}}  # type: ignore[union-attr]
    found = [get_module_class_from_name(Model(), name) for name in ("Linear", "Model", "Other")]
    assert found == [nn.Linear, Model, None]


def test_a_class_that_is_not_in_the_model_is_refused() -> None:
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Blok"])
    with pytest.raises(ValueError, match=r"'Blok'.*modules in Model.*Did you mean 'Block'\?"):
        plugin.set_auto_wrap_policy(Model())
    with pytest.warns(UserWarning, match="Linear has no _no_split_modules"):
        Plugin(auto_wrap_policy="transformer_based_wrap").set_auto_wrap_policy(nn.Linear(1, 1))


def test_other_wrapping() -> None:
    plugin = Plugin(auto_wrap_policy="size_based_wrap", min_num_params=100)
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy.keywords == {"min_num_params": 100}  # type: ignore[union-attr]
    plugin = Plugin(auto_wrap_policy="size_based_wrap")
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy is None
    mine = CustomPolicy(lambda module: False)
    plugin = Plugin(auto_wrap_policy=mine)  # type: ignore[arg-type]
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy is mine


def test_configs_of_torch_that_nobody_reads_are_told_of() -> None:
    with pytest.warns(UserWarning, match=r"Plugin.state_dict_config=.*rank0_only=False.* is not used"):
        plugin = Plugin(state_dict_type="FULL_STATE_DICT", state_dict_config=FullStateDictConfig(rank0_only=False))
    again = dataclasses.replace(Plugin(state_dict_type="FULL_STATE_DICT"))  # nothing to tell
    assert again.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert plugin.state_dict_config == FullStateDictConfig(rank0_only=False)
