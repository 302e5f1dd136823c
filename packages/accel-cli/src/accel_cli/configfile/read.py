"""Reading a settings file."""

from __future__ import annotations

import os
from typing import Any

from accel_cli.configfile.location import default_config_path
from accel_cli.configfile.parse import parse
from accel_cli.configfile.schema import BaseConfig, ClusterConfig, SageMakerConfig
from accel_cli.configfile.source import Source, read_source


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> BaseConfig:
    """Read a settings file.

    Args:
        config_file: A path; `*.json` is read as JSON and anything else as YAML. None means the default file.

    Returns:
        `ClusterConfig`, or `SageMakerConfig` when the file says `compute_environment: AMAZON_SAGEMAKER`.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: When it cannot be read, or says something that is not allowed.
    """
    values, source = read_values(config_file)
    return config_class(values).from_values(values, source)


def read_values(
    config_file: str | os.PathLike[str] | None, format: str | None = None
) -> tuple[dict[str, Any], Source]:
    """Read what a settings file says, without judging it.

    Args:
        config_file: A path; None means the default file.
        format: `"json"` or `"yaml"`; chosen by the ending of the name when None.

    Returns:
        The values, and the file, for messages.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: When it is not JSON or YAML, or is not a set of `key: value` pairs.
    """
    path = os.path.expanduser(config_file) if config_file is not None else default_config_path(os.environ)
    source = read_source(path)
    return parse(source, format), source


def config_class(values: dict[str, Any]) -> type[BaseConfig]:
    """Choose the kind of settings that a file holds."""
    at_amazon = str(values.get("compute_environment")).upper() == "AMAZON_SAGEMAKER"
    return SageMakerConfig if at_amazon else ClusterConfig
