"""A job on Amazon SageMaker through the real SDK; only Amazon's answers are made up."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from accel_cli.launch.runners import sagemaker
from tests.cli.pretended import plan_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sagemaker") is None and "LIBRARIES_REQUIRED" not in os.environ,
    reason="needs sagemaker<3: run `tools/dev.py sagemaker`",
)
SETTINGS = {
    "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL", "mixed_precision": "fp16",
    "ec2_instance_type": "ml.p3.16xlarge", "iam_role_name": "role", "num_machines": 2, "region": "us-east-1",
    "sagemaker_inputs_file": "inputs.tsv", "sagemaker_metrics_file": "metrics.tsv",
}  # fmt: skip
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ANSWERS: dict[str, dict[str, Any]] = {
    "GetCallerIdentity": {"Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/me"},
    "GetRole": {"Role": {"Arn": "arn:aws:iam::123456789012:role/role"}},
    "DescribeTrainingJob": {
        "TrainingJobStatus": "Completed", "SecondaryStatus": "Completed", "ResourceConfig": {"InstanceCount": 2},
        "CreationTime": NOW, "LastModifiedTime": NOW, "TrainingStartTime": NOW, "TrainingEndTime": NOW,
        "TrainingTimeInSeconds": 1, "BillableTimeInSeconds": 1, "ModelArtifacts": {"S3ModelArtifacts": "s3://b/m"},
        "SecondaryStatusTransitions": [{"Status": "Completed", "StartTime": NOW, "StatusMessage": ""}],
    },
    "ListBuckets": {"Buckets": [{"Name": "sagemaker-us-east-1-123456789012"}]},
    "DescribeLogStreams": {"logStreams": []},
}  # fmt: skip


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What Amazon is asked for: every operation and its arguments."""
    from botocore.client import BaseClient

    calls: list[tuple[str, dict[str, Any]]] = []

    def answer(self: Any, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if operation == "PutObject":
            arguments = {**arguments, "Body": arguments["Body"].read()}
        calls.append((operation, arguments))
        return ANSWERS.get(operation, {})

    monkeypatch.setattr(BaseClient, "_make_api_call", answer)
    monkeypatch.chdir(tmp_path)
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    sdk = {"SAGEMAKER_SUPPRESS_V2_WARNING": "1", "SAGEMAKER_USER_CONFIG_OVERRIDE": str(tmp_path / "defaults.yaml")}
    for name, value in {"HOME": str(tmp_path), **keys, **sdk}.items():
        monkeypatch.setenv(name, value)
    Path("defaults.yaml").write_text(
        "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"
    )
    Path("sub").mkdir()
    Path("sub/train.py").write_text("print('trained')\n")
    Path("inputs.tsv").write_text("channel_name\tdata_location\ntrain\ts3://bucket/train\n")
    Path("metrics.tsv").write_text("metric_name\tmetric_regex\naccuracy\tacc=(.*)\n")
    Path("a.json").write_text(json.dumps(SETTINGS))
    return calls


@pytest.mark.filterwarnings("ignore")  # the SDK's own
def test_a_job_is_created(asked: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    plan = plan_of("--config_file", "a.json", "sub/train.py", "--lr", "1e-3", environ=dict(os.environ))
    assert sagemaker.main([plan.argv[-1]]) == 0
    job = next(arguments for operation, arguments in asked if operation == "CreateTrainingJob")
    assert job["RoleArn"] == "arn:aws:iam::123456789012:role/role"
    assert job["ResourceConfig"]["InstanceType"] == "ml.p3.16xlarge"
    assert job["ResourceConfig"]["InstanceCount"] == 2
    assert job["Environment"]["ACCELERATE_USE_SAGEMAKER"] == "true"
    assert job["Environment"]["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert job["HyperParameters"]["lr"] == "0.001"
    assert job["HyperParameters"]["sagemaker_program"] == '"train.py"'
    assert job["HyperParameters"]["sagemaker_distributed_dataparallel_enabled"] == "true"
    assert "huggingface-pytorch-training:1.10.2-transformers4.17.0" in job["AlgorithmSpecification"]["TrainingImage"]
    assert job["AlgorithmSpecification"]["MetricDefinitions"] == [{"Name": "accuracy", "Regex": "acc=(.*)"}]
    assert job["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/train"
    (code,) = (arguments["Body"] for operation, arguments in asked if operation == "PutObject")
    Path("code.tar.gz").write_bytes(code)
    with tarfile.open("code.tar.gz") as archive:
        assert archive.getnames() == ["train.py"]
