"""Reading a settings file: JSON, or YAML without its dangerous parts."""

from __future__ import annotations

import json
import os
from typing import Any

from accel_cli.configfile.location import default_config_path
from accel_cli.configfile.schema import BaseConfig, ClusterConfig, SageMakerConfig


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
    at_amazon = values.get("compute_environment") == "AMAZON_SAGEMAKER"
    return (SageMakerConfig if at_amazon else ClusterConfig).from_values(values, source)


def read_values(config_file: str | os.PathLike[str] | None, format: str | None = None) -> tuple[dict[str, Any], str]:
    """Read what a settings file says, without judging it.

    Args:
        config_file: A path; None means the default file.
        format: `"json"` or `"yaml"`; chosen by the ending of the name when None.

    Returns:
        The values, and the path for use in messages.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: When it is not JSON or YAML, or is not a set of `key: value` pairs.
    """
    path = os.path.expanduser(config_file) if config_file is not None else default_config_path(os.environ)
    source = f"Settings file {str(path)!r}"
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{source} does not exist. Write one with `accelerate config default`, or name another."
        )
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} cannot be read: {error}.") from error
    values = _parse(text, format or ("json" if str(path).endswith(".json") else "yaml"), source)
    if not isinstance(values, dict):
        kind = "nothing" if values is None else f"a {type(values).__name__}"
        raise ValueError(f"{source} must hold `key: value` pairs, but holds {kind}.")
    return values, source


def _parse(text: str, format: str, source: str) -> Any:
    if text.lstrip().startswith("{"):  # most YAML files that programs write are JSON, and PyYAML is slow to import
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if format == "json":
                raise ValueError(f"{source} is not valid JSON: {error}.") from None
    elif format == "json":
        raise ValueError(f"{source} is not valid JSON: it must begin with a brace.")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{source} is not valid YAML: {words}.") from None
