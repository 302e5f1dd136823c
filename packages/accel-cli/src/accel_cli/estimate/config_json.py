"""The `config.json` of a model, and the libraries that build models from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accel_cli.errors import UsageError

CONFIG_NAME = "config.json"
LIBRARIES = ("timm", "transformers")
MAX_CONFIG_BYTES = 1 << 26


def read_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`.

    Raises:
        UsageError: It is not valid.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(
                f"{path} has {path.stat().st_size} bytes, too many for a model's configuration. Check the file."
            )
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}). Correct it, or download the model again.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a model's configuration: it holds a {type(config).__name__}, not an object.")
    return config
