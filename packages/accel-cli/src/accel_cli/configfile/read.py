"""Reading a config file."""

from __future__ import annotations

import os
from typing import Any

from accel_cli.configfile.schema import BaseConfig, ClusterConfig, SageMakerConfig
from accel_cli.configfile.values import read_values


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> BaseConfig:
    """Read a config file.

    Args:
        config_file: A path; `*.json` is read as JSON and anything else as YAML. None means the default file.

    Returns:
        `ClusterConfig`, or `SageMakerConfig` when the file says `compute_environment: AMAZON_SAGEMAKER`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read, or a value in it is not valid.
    """
    values, source = read_values(config_file)
    return config_class(values).from_values(values, source)


def config_class(values: dict[str, Any]) -> type[BaseConfig]:
    """Choose the class for the content of a file."""
    at_amazon = str(values.get("compute_environment")).upper() == "AMAZON_SAGEMAKER"
    return SageMakerConfig if at_amazon else ClusterConfig
