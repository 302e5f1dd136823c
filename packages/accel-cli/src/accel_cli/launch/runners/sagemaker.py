"""Jobs on Amazon SageMaker, started through its SDK; run as a program by the launches that this plans."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from accel_cli.errors import MissingFileError, NotHereError, UsageError
from accel_cli.launch.flags.table import RESOURCES, value_of
from accel_cli.launch.libraries import SAGEMAKER
from accel_cli.launch.plan import Plan
from accel_cli.launch.settings import LaunchSettings

DATA_PARALLEL = {"smdistributed": {"dataparallel": {"enabled": True}}}
NOT_SENT = ("OMP_NUM_THREADS", "ACCELERATE_CPU_AFFINITY")  # for this machine only


def plan(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    """Plan a job.

    Args:
        settings: The resolved settings; `settings.sagemaker` is the config file.
        environ: The variables that are set already.

    Raises:
        ValueError: The script or its arguments cannot be sent, or there are no credentials.
    """
    config = settings.sagemaker
    estimator, inputs = job(config, settings)
    text = json.dumps({"estimator": estimator, "inputs": inputs})
    try:
        variables = credentials(config, settings, environ)
    except NotHereError:
        if not settings.dry_run:
            raise
        variables = {}
    return Plan(
        "sagemaker", (sys.executable or "python3", "-m", __name__, text), variables, quiet=bool(settings.quiet)
    )


def job(config: Any, settings: LaunchSettings) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the arguments of SageMaker's `HuggingFace` estimator, and the inputs of its `fit`.

    Args:
        config: A `SageMakerConfig`.
        settings: The settings of the command line, or the resolved settings.

    Raises:
        ValueError: The script or its arguments cannot be sent.
        FileNotFoundError: A table that the config file names does not exist.
    """
    script = settings.training_script
    if settings.module or settings.no_python or not script.endswith(".py"):
        raise UsageError(
            f"Amazon SageMaker only runs Python files, got {script!r}. Name a .py file, without -m or --no_python."
        )
    kind = config.distributed_type.value
    metrics = _table(config.sagemaker_metrics_file, "metric_name", "metric_regex")
    arguments = {
        "image_uri": config.image_uri,
        "entry_point": os.path.basename(script),
        "source_dir": os.path.dirname(script) or ".",
        "role": config.iam_role_name,
        "transformers_version": config.transformers_version,
        "pytorch_version": config.pytorch_version,
        "py_version": config.py_version,
        "base_job_name": config.base_job_name,
        "instance_count": config.num_machines,
        "instance_type": config.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": DATA_PARALLEL if kind == "DATA_PARALLEL" else None,
        "hyperparameters": hyperparameters(settings.training_script_args),
        "environment": _environment(config, settings, kind),
        "metric_definitions": None if metrics is None else [{"Name": a, "Regex": b} for a, b in metrics.items()],
    }
    inputs = _table(config.sagemaker_inputs_file, "channel_name", "data_location")
    return arguments | (config.additional_args or {}), inputs


def _environment(config: Any, settings: LaunchSettings, kind: str) -> dict[str, str]:
    """Return the variables of the job."""
    job_settings = settings.with_changes(
        mixed_precision=settings.mixed_precision or config.mixed_precision or "no",
        options={**settings.options, "dynamo_backend": value_of(settings, "dynamo_backend") or "no"},
    )
    rows = (row for group in RESOURCES for row in group.variables(job_settings))
    variables = {name: text for _, name, text in rows if name not in NOT_SENT}
    return {"ACCELERATE_USE_SAGEMAKER": "true", **variables, "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind}


def hyperparameters(words: Sequence[str]) -> dict[str, int | float | bool | str]:
    """Turn the arguments of a script into SageMaker's hyperparameters, which it passes as `--name value` pairs.

    Raises:
        ValueError: The arguments are not such pairs.

    Example:
        ```python
        hyperparameters(["--lr", "1e-3", "--epochs=3"])  # {"lr": 0.001, "epochs": 3}
        ```
    """
    found: dict[str, int | float | bool | str] = {}
    waiting = list(words)
    while waiting:
        word, has_value, value = waiting.pop(0).partition("=")
        if not _is_flag(word):
            raise UsageError(
                f"Amazon SageMaker only passes `--name value` pairs to the script, and {word!r} has no name. Give it one."
            )
        if not has_value:
            if not waiting or _is_flag(waiting[0]):
                raise UsageError(
                    f"Amazon SageMaker only passes `--name value` pairs to the script, and {word} has no value. Give it "
                    f"one, for example `{word} True`, and let the script parse it."
                )
            value = waiting.pop(0)
        name = word.lstrip("-").replace("-", "_")
        if name in found:
            raise UsageError(f"{word} is given twice, but Amazon SageMaker passes only one value. Leave one out.")
        found[name] = _number_or_text(value)
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and isinstance(_number_or_text(word), str)


def _number_or_text(text: str) -> int | float | bool | str:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_credentials(settings: LaunchSettings) -> None:
    """Check that there are AWS credentials for a job.

    Raises:
        NotHereError: There are none.
    """
    if settings.sagemaker is not None:
        credentials(settings.sagemaker, settings, os.environ)


def credentials(config: Any, settings: LaunchSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with the AWS credentials.

    Raises:
        NotHereError: Neither the config file, nor the flags, nor the environment have any.
    """
    variables = {"AWS_DEFAULT_REGION": config.region} if config.region else {}
    if config.profile:
        return variables | {"AWS_PROFILE": config.profile}
    given = {name: getattr(settings, name.lower()) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    if all(given.values()):
        return variables | given
    if environ.get("AWS_PROFILE") or all(environ.get(name) for name in given):
        return variables
    raise NotHereError(
        "There are no AWS credentials. Set profile in the config file, or give --aws_access_key_id and "
        "--aws_secret_access_key."
    )


def _table(path: str | None, key: str, value: str) -> dict[str, str] | None:
    """Read two columns of a file of tab-separated values; None without a file."""
    if not path:
        return None
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
    except FileNotFoundError:
        raise MissingFileError(f"{path!r}, which the config file names, does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path!r}, which the config file names, cannot be read: {error}.") from None
    if not all(row.get(key) and row.get(value) for row in rows):
        raise UsageError(f"{path!r} must have the columns {key} and {value}, separated by tabs.")
    return {row[key]: row[value] for row in rows}


def main(words: Sequence[str] | None = None) -> int:
    """Start a job: one argument, JSON with `estimator` and `inputs`.

    Returns:
        The exit status: 0, or 2 if the job cannot be started.
    """
    (text,) = sys.argv[1:] if words is None else words
    try:
        sdk = import_module("sagemaker.huggingface")
    except ImportError as error:
        print(
            f"accelerate launch: error: Amazon SageMaker needs the library 'sagemaker' in version 2: {error}. Run: pip "
            f"install '{SAGEMAKER}'",
            file=sys.stderr,
        )
        return 2
    given = json.loads(text)
    sdk.HuggingFace(**given["estimator"]).fit(inputs=given["inputs"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
