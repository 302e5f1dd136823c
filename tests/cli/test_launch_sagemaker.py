"""Jobs on Amazon SageMaker, without Amazon: a stand-in for its SDK notes what it is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_cli.configfile.schema import SageMakerConfig
from accel_cli.launch.command import launch_command_parser
from accel_cli.launch.plan import Plan
from accel_cli.launch.runners import sagemaker
from accel_cli.main import main
from accel_state import libraries
from accelerate.commands import launch as old_launch
from accelerate.utils import launch as old_utils
from tests.cli.pretended import plan_of, settings_of
from tests.cli.running import refusal

SETTINGS = {
    "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL", "mixed_precision": "no",
    "ec2_instance_type": "ml.p3.16xlarge", "iam_role_name": "role", "profile": "me", "num_machines": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def files(tmp_path: Path, in_a_folder_with_a_script: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sub").mkdir()
    for name in ("sub/train.py", "train.sh"):
        (tmp_path / name).touch()
    (tmp_path / "inputs.tsv").write_text("channel_name\tdata_location\ntrain\ts3://bucket/train\n")
    (tmp_path / "metrics.tsv").write_text("metric_name\tmetric_regex\naccuracy\tacc=(.*)\n")


def write(**values: Any) -> str:
    Path("a.json").write_text(json.dumps(SETTINGS | values))
    return "a.json"


def job(
    *words: str, environ: dict[str, str] | None = None, **values: Any
) -> tuple[dict[str, Any], Any, dict[str, str]]:
    plan = plan_of("--config_file", write(**values), *words, environ=environ)
    assert plan.runner == "sagemaker"
    given = json.loads(plan.argv[-1])
    return given["estimator"], given["inputs"], plan.environment


def test_a_job() -> None:
    estimator, inputs, variables = job(
        "--mixed_precision", "fp16", "sub/train.py", "--lr", "1e-3", "--epochs=3", "--two-words", "a b", "--flag",
        "True", "--shift", "-1",
        image_uri="image", sagemaker_inputs_file="inputs.tsv", sagemaker_metrics_file="metrics.tsv",
        additional_args={"max_run": 5}, dynamo_config={"dynamo_backend": "INDUCTOR"}, region="eu-west-1",
    )  # fmt: skip
    assert estimator == {
        "image_uri": "image", "entry_point": "train.py", "source_dir": "sub", "role": "role",
        "transformers_version": "4.17.0", "pytorch_version": "1.10.2", "py_version": "py38",
        "base_job_name": "accelerate-sagemaker-1", "instance_count": 2, "instance_type": "ml.p3.16xlarge",
        "debugger_hook_config": False, "distribution": {"smdistributed": {"dataparallel": {"enabled": True}}},
        "hyperparameters": {"lr": 0.001, "epochs": 3, "two_words": "a b", "flag": True, "shift": -1},
        "environment": {
            "ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_MIXED_PRECISION": "fp16",
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "default",
            "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
        },
        "metric_definitions": [{"Name": "accuracy", "Regex": "acc=(.*)"}], "max_run": 5,
    }  # fmt: skip
    assert inputs == {"train": "s3://bucket/train"}
    assert variables == {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_PROFILE": "me"}


def test_the_least() -> None:
    estimator, inputs, _ = job("train.py", distributed_type="NO", num_machines=1)
    assert inputs is None
    assert (estimator["source_dir"], estimator["distribution"], estimator["metric_definitions"]) == (".", None, None)


def test_who_pays() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    flags = ["--aws_access_key_id", "k", "--aws_secret_access_key", "s"]
    assert job(*flags, "train.py", profile=None)[2] == {"AWS_DEFAULT_REGION": "us-east-1", **keys}
    assert job("train.py", profile=None, environ=keys)[2] == {"AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.raises(ValueError, match="Set profile in the config file, or give --aws_access_key_id"):
        job("train.py", profile=None)


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        (["train.sh"], {}, "got 'train.sh'"),
        (["-m", "json"], {}, "got 'json'.*without -m"),
        (["train.py", "lr", "1"], {}, "'lr' has no name"),
        (["train.py", "--lr", "1", "2"], {}, "'2' has no name"),
        (["train.py", "--fast", "--lr", "1"], {}, "--fast has no value"),
        (["train.py", "--fast"], {}, "--fast has no value"),
        (["train.py", "--lr", "1", "--lr", "2"], {}, "--lr is given twice"),
        (["train.py"], {"sagemaker_inputs_file": "no.tsv"}, "'no.tsv', which the config file names, does not exist"),
        (
            ["train.py"],
            {"sagemaker_inputs_file": "metrics.tsv"},
            "must have the columns channel_name and data_location",
        ),
        (["train.py"], {"sagemaker_metrics_file": "sub"}, "cannot be read"),
    ],
)
def test_mistakes(words: list[str], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(*words, **values)


def test_hardware_on_the_command_line_starts_here() -> None:
    settings = settings_of("--config_file", write(), "--multi_gpu", "--num_processes", "2", "train.py")
    assert settings.runner == "torchrun"
    assert "Amazon SageMaker" in settings.notes[0]


def test_the_sdk_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def estimator(**arguments: Any) -> Any:
        calls.append(arguments)
        return SimpleNamespace(fit=lambda inputs: calls.append(inputs))

    monkeypatch.setitem(sys.modules, "sagemaker", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sagemaker.huggingface", SimpleNamespace(HuggingFace=estimator))
    plan = plan_of("--config_file", write(sagemaker_inputs_file="inputs.tsv"), "train.py")
    assert sagemaker.main([plan.argv[-1]]) == 0
    assert calls[0]["entry_point"] == "train.py"
    assert calls[1] == {"train": "s3://bucket/train"}


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    said = refusal(capsys, "launch", "--config_file", write(), "train.py")
    assert "needs the library 'sagemaker', which is not installed" in said
    assert sagemaker.main(['{"estimator": {}, "inputs": null}']) == 2
    assert "pip install 'sagemaker>=2.232,<3'" in capsys.readouterr().err


def test_a_dry_run_needs_neither_the_sdk_nor_credentials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    assert main(["launch", "--dry_run", "--config_file", write(profile=None), "train.py"]) == 0
    said = capsys.readouterr()
    assert "a launch on this machine would fail: There are no AWS credentials" in said.err
    assert "accel_cli.launch.runners.sagemaker" in said.out


def test_with_a_version_that_has_another_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 3 is a namespace package without `sagemaker.huggingface`."""
    monkeypatch.setattr(
        libraries, "_is_found", libraries._is_found.__wrapped__
    )  # which remembers other tests' answers
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    for path, text in {
        "sagemaker/core/__init__.py": "",
        "sagemaker-3.27.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sagemaker\nVersion: 3.27.0\n",
    }.items():
        (tmp_path / "installed" / path).parent.mkdir(parents=True)
        (tmp_path / "installed" / path).write_text(text)
    error = refusal(capsys, "launch", "--config_file", write(), "train.py")
    assert "the module 'sagemaker.huggingface', which sagemaker 3.27.0 does not have" in error
    assert "pip install 'sagemaker>=2.232,<3'" in error


def test_functions_for_programs(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    config = SageMakerConfig(**SETTINGS, use_cpu=False, debug=False)
    args = launch_command_parser().parse_args(["--dynamo_backend", "inductor", "train.py", "--lr", "1"])
    monkeypatch.setattr("os.environ", {})
    arguments, inputs = old_utils.prepare_sagemager_args_inputs(config, args)
    assert arguments["hyperparameters"] == {"lr": 1}
    assert arguments["environment"]["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert arguments["environment"]["ACCELERATE_MIXED_PRECISION"] == "no"
    assert inputs is None
    for name in ("sagemaker", "sagemaker.huggingface"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    old_launch.sagemaker_launcher(config, args)
    assert plans[0].environment["AWS_PROFILE"] == "me"
