"""Old config files: they load, and `accelerate config update` brings them to today's layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from accel_cli.configfile.migrate import CHANGES, migrate
from accel_cli.configfile.read import load_config_from_file
from accel_cli.configfile.schema import ClusterConfig
from accel_cli.configfile.update import update
from accel_cli.main import main
from tests.cli.pretended import settings_of, value_in
from tests.cli.running import refusal
from tests.support.short_run import examples

# what files of these versions hold, as far as they differ from today's
OLD_FILES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "0.3": (
        {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "fp16": True, "machine_rank": 0,
         "main_process_ip": None, "main_process_port": None, "main_training_function": "main", "num_machines": 1,
         "num_processes": 2},
        {"mixed_precision": "fp16", "distributed_type": "MULTI_GPU", "num_machines": 1},
        {"mixed_precision": "fp16", "multi_gpu": True, "num_processes": 2},
    ),
    "0.11, DeepSpeed": (
        {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "fp16",
         "main_process_ip": "", "main_process_port": "", "num_processes": 2, "use_cpu": False,
         "deepspeed_config": {"zero_stage": 3, "offload_optimizer": True, "offload_param": False,
                              "zero3_save_fp16_model": True, "gradient_accumulation_steps": 1}},
        {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none",
                              "zero3_save_16bit_model": True, "gradient_accumulation_steps": 1}},
        {"use_deepspeed": True, "offload_optimizer_device": "cpu", "zero3_save_16bit_model": "True"},
    ),
    "0.12, FSDP": (
        {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
         "num_processes": 2, "downcast_bf16": "no",
         "fsdp_config": {"sharding_strategy": 2, "offload_params": False, "min_num_params": 2000,
                         "fsdp_auto_wrap_policy": 2, "fsdp_backward_prefetch_policy": 1, "fsdp_state_dict_type": 3}},
        {"downcast_bf16": False,
         "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": False,
                         "fsdp_min_num_params": 2000, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
                         "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}},
        {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE",
         "fsdp_min_num_params": 2000, "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    ),
    "0.15, dynamo": (
        {"distributed_type": "NO", "dynamo_backend": "INDUCTOR", "mixed_precision": "no", "use_cpu": False,
         "num_processes": 1},
        {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        {"dynamo_backend": "INDUCTOR"},
    ),
    "0.16, Mac": (
        {"distributed_type": "MPS", "mixed_precision": "NO", "dynamo_backend": "NO", "num_processes": 1},
        {"distributed_type": "NO", "mixed_precision": "no"},
        {"mixed_precision": "no", "dynamo_backend": "no", "num_processes": 1},
    ),
    "0.20, TPU": (
        {"distributed_type": "TPU", "num_processes": 8, "downcast_bf16": "yes", "tpu_env": [], "mixed_precision": "no"},
        {"distributed_type": "XLA", "downcast_bf16": True},
        {"tpu": True, "downcast_bf16": True, "num_processes": 8},
    ),
    "0.22, IPEX": (
        {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True, "mixed_precision": "bf16",
         "ipex_config": {"ipex": True, "use_xpu": False}},
        {"distributed_type": "MULTI_CPU"},
        {"use_cpu": True, "num_processes": 2},
    ),
    "0.34, FP8": (
        {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp8",
         "fp8_config": {"backend": "TE", "amax_history_length": 32, "amax_compute_algorithm": "max", "margin": 1,
                        "override_linear_precision": [False, True, False]}},
        {"fp8_config": {"fp8_backend": "TE", "fp8_amax_history_len": 32, "fp8_amax_compute_algo": "max",
                        "fp8_margin": 1, "fp8_override_linear_precision": [False, True, False]}},
        {"fp8_backend": "TE", "fp8_amax_history_len": 32, "fp8_amax_compute_algo": "max", "fp8_margin": 1},
    ),
    "1.15, FSDP 1": (
        {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no",
         "fsdp_config": {"fsdp_version": 1, "fsdp_reshard_after_forward": "HYBRID_SHARD",
                         "fsdp_transformer_layer_cls_to_wrap": ["A", "B"]}},
        {"fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD",
                         "fsdp_transformer_layer_cls_to_wrap": "A,B"}},
        {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_transformer_layer_cls_to_wrap": "A,B"},
    ),
}  # fmt: skip


def old_file(tmp_path: Path, content: dict[str, Any], name: str = "old.yaml") -> Path:
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content) if name.endswith("yaml") else json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["old.yaml", "old.json"])
@pytest.mark.parametrize("version", OLD_FILES)
def test_old_files_load_as_they_are_and_mean_the_same_when_updated(tmp_path: Path, version: str, name: str) -> None:
    content, today, wanted = OLD_FILES[version]
    path = old_file(tmp_path, content, name)
    resolved = settings_of("--config_file", str(path), "x.py")
    assert {key: value_in(resolved, key) for key in wanted} == wanted
    assert resolved.notes == ()
    assert main(["config", "update", "--config_file", str(path)]) == 0
    text = path.read_text()
    values = yaml.safe_load(text)
    assert values == values | today
    assert values["num_machines"] == 1
    assert values["debug"] is False
    assert {"fp16", "dynamo_backend", "ipex_config"}.isdisjoint(values)
    assert text.startswith("{") == (name == "old.json")
    resolved = settings_of("--config_file", str(path), "x.py")
    assert {key: value_in(resolved, key) for key in wanted} == wanted
    assert update(str(path)) == []
    assert path.read_text() == text


def test_what_changed_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, _, _ = OLD_FILES["0.12, FSDP"]
    path = old_file(tmp_path, {**content, "ipex_config": {"ipex": True}, "fp16": True, "main_process_ip": ""})
    assert main(["config", "update", "--config_file", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "replaced fp16: True by mixed_precision: 'bf16'",
        "removed ipex_config: {'ipex': True} (torch does this by itself now)",
        "removed main_process_ip: ''",
        "changed downcast_bf16: 'no' is now False",
        "renamed fsdp_config.offload_params to fsdp_config.fsdp_offload_params",
        "changed fsdp_config.fsdp_sharding_strategy: 2 is now 'SHARD_GRAD_OP'",
        "added machine_rank: 0",
        f"{path} is up to date",
    ):
        assert line in lines


def test_a_file_that_is_new_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    path.write_text("# mine\n" + yaml.safe_dump(ClusterConfig("LOCAL_MACHINE", "NO", "no", False, False).to_dict()))  # type: ignore[arg-type]
    before = path.stat().st_mtime_ns
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert path.stat().st_mtime_ns == before


def test_json_in_a_yaml_file_becomes_yaml(tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    config = ClusterConfig("LOCAL_MACHINE", "NO", "bf16", False, False)  # type: ignore[arg-type]
    config.to_json_file(str(path))
    assert update(str(path)) == []
    assert not path.read_text().startswith("{")
    assert load_config_from_file(path) == config


def test_the_default_file_is_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    path = old_file(tmp_path / "accelerate", {"distributed_type": "NO", "fp16": True}, "default_config.yaml")
    assert main(["config", "update"]) == 0
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "fp16"


def test_what_cannot_be_updated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refusal(capsys, "config", "update", "--config_file", str(tmp_path / "none.yaml"))
    path = old_file(tmp_path, {"distributed_type": "NO", "fp16": True, "num_machnes": 2})
    text = path.read_text()
    assert "Did you mean 'num_machines'" in refusal(capsys, "config", "update", "--config_file", str(path))
    assert path.read_text() == text


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    path = old_file(tmp_path, {"distributed_type": "NO", "fp16": True})
    path.chmod(0o600)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    update(str(link))
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "fp16" in path.read_text()


def test_a_failed_update_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old_file(tmp_path, {"distributed_type": "NO", "fp16": True})
    text = path.read_text()

    def full(handle: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["config", "update", "--config_file", str(path)]) == 2
    assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["old.yaml"]


def test_what_is_no_longer_there_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: NO\nipex_config:\n  ipex: true\n")
    assert load_config_from_file(path).to_dict()["distributed_type"] == "NO"
    assert "line 2: ipex_config has no effect any more" in caplog.text


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_updating_twice_is_updating_once(data: st.DataObject) -> None:
    values: dict[str, Any] = {}
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(0, 5), st.sampled_from(["", "no", "TPU", "1", "FULL_SHARD"])
    )
    for change in data.draw(st.lists(st.sampled_from(CHANGES), max_size=8)):
        section, _, name = change.old.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = data.draw(scalars)
    before = json.dumps(values)
    once, _ = migrate(values)
    assert json.dumps(values) == before
    twice, done = migrate(once)
    assert twice == once
    assert done == []
