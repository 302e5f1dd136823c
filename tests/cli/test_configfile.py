"""Config files: what they may say, and that they are only data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import accel_state.devices
from accel_cli.configfile.location import default_config_path
from accel_cli.configfile.read import load_config_from_file
from accel_cli.configfile.schema import BaseConfig, ClusterConfig, SageMakerConfig
from accel_cli.configfile.write import write_basic_config
from accel_cli.main import main
from accel_state.devices import device_kind
from accel_state.enums import DistributedType


def read(tmp_path: Path, text: str, name: str = "a.yaml") -> BaseConfig:
    path = tmp_path / name
    path.write_text(text)
    return load_config_from_file(str(path))


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_missing_keys_are_completed(tmp_path: Path, name: str) -> None:
    config = read(tmp_path, '{"distributed_type": "NO"}', name)
    assert isinstance(config, ClusterConfig)
    assert config.to_dict() == {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": False, "debug": False,
        "num_processes": 1, "machine_rank": 0, "num_machines": 1, "rdzv_backend": "static", "same_network": False,
        "main_training_function": "main", "enable_cpu_affinity": False, "downcast_bf16": False,
        "tpu_use_cluster": False, "tpu_use_sudo": False,
    }  # fmt: skip
    assert config.fsdp_config == {}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("{distributed_type: MULTI_GPU, fp16: true}", "mixed_precision", "fp16"),
        ("{distributed_type: MULTI_GPU, fp16: false}", "mixed_precision", None),
        ("{distributed_type: 'NO', dynamo_backend: INDUCTOR}", "dynamo_config", {"dynamo_backend": "INDUCTOR"}),
        ("{distributed_type: 'NO', dynamo_backend: NO}", "dynamo_config", {}),
        ("{distributed_type: NO}", "distributed_type", DistributedType.NO),
        ("{distributed_type: NO, mixed_precision: no}", "mixed_precision", "no"),
        ("{distributed_type: fsdp, num_processes: 2}", "distributed_type", DistributedType.FSDP),
    ],
)
def test_old_and_sloppy_spellings(tmp_path: Path, text: str, name: str, value: Any) -> None:
    assert getattr(read(tmp_path, text), name) == value


def test_sagemaker_has_its_own(tmp_path: Path) -> None:
    text = "{compute_environment: AMAZON_SAGEMAKER, distributed_type: DATA_PARALLEL, iam_role_name: r, %s}"
    config = read(tmp_path, text % "ec2_instance_type: ml.p3")
    assert isinstance(config, SageMakerConfig)
    assert config.region == "us-east-1"
    with pytest.raises(ValueError, match="has no ec2_instance_type"):
        read(tmp_path, text % "num_machines: 2")


@pytest.mark.parametrize("format", ["json", "yaml"])
def test_what_is_written_can_be_read(tmp_path: Path, format: str) -> None:
    config = ClusterConfig("LOCAL_MACHINE", "FSDP", "bf16", False, False, fsdp_config={"fsdp_version": 2})  # type: ignore[arg-type]
    path = str(tmp_path / f"a.{format}")
    getattr(config, f"to_{format}_file")(path)
    assert getattr(ClusterConfig, f"from_{format}_file")(path) == config
    assert load_config_from_file(path) == config


def test_the_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert default_config_path(os.environ) == str(tmp_path / "accelerate" / "default_config.yaml")
    assert default_config_path({"XDG_CACHE_HOME": "/c"}) == "/c/huggingface/accelerate/default_config.yaml"
    write_basic_config("bf16", default_config_path(os.environ))
    assert ClusterConfig.from_yaml_file().mixed_precision == "bf16"
    assert load_config_from_file(None).mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("kind", "count", "wanted"),
    [
        ("cpu", 1, {"distributed_type": "NO", "num_processes": 1, "use_cpu": True}),
        ("cuda", 1, {"distributed_type": "NO", "num_processes": 1, "use_cpu": False}),
        ("cuda", 2, {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": False}),
        ("xpu", 2, {"distributed_type": "MULTI_XPU", "num_processes": 2, "use_cpu": False}),
    ],
)
def test_basic_settings_use_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int, wanted: dict[str, Any]
) -> None:
    monkeypatch.setattr(accel_state.devices, "detect_device_kind", lambda: device_kind(kind))
    monkeypatch.setattr(accel_state.devices.DeviceKind, "device_count", lambda self: count)
    path = tmp_path / "new" / "a.json"
    assert write_basic_config(save_location=str(path)) == path
    written = json.loads(path.read_text())
    assert written == written | wanted
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_basic_settings_as_yaml(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    write_basic_config("bf16", path)
    as_json = path.read_text()
    path.unlink()
    assert main(["config", "default", "--config_file", str(path), "--mixed_precision", "bf16"]) == 0
    as_yaml = path.read_text()
    assert json.loads(as_json) == yaml.safe_load(as_yaml)
    assert "{" not in as_yaml
    assert main(["config", "default", "--config_file", str(tmp_path / "b.json")]) == 0
    assert json.loads((tmp_path / "b.json").read_text())["mixed_precision"] == "no"
    assert main(["config", "default", "--config_file", str(tmp_path)]) == 2


def test_basic_settings_never_replace_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text("mine")
    assert write_basic_config(save_location=str(path)) is False
    assert "already exists" in capsys.readouterr().out
    assert path.read_text() == "mine"
    with pytest.raises(ValueError, match="mixed_precision must be one of .* got 'half'"):
        write_basic_config("half", str(tmp_path / "b.json"))
    assert not (tmp_path / "b.json").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_basic_config(save_location=str(tmp_path / "a.json"))
    assert list(tmp_path.iterdir()) == []
