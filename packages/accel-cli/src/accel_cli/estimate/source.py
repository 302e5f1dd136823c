"""The source of a model: a local folder or the Hub, with a library that builds it or only safetensors files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_cli.errors import MissingFileError, UsageError, did_you_mean
from accel_cli.estimate.config_json import CONFIG_NAME, LIBRARIES, read_config


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and its source.

    Attributes:
        name: Its name, as given.
        folder: The local folder; None for a model on the Hub.
        library: The library that builds it; None for a folder with safetensors files only.
        config: Content of its `config.json`; empty if it was not needed.
        token: For the Hub.
    """

    name: str
    folder: Path | None
    library: str | None
    config: dict[str, Any]
    token: str | None = None


def find_model(name: str, library: str | None = None, token: str | None = None) -> ModelSource:
    """Find a model by its name. A local folder is never looked up on the Hub.

    Args:
        name: A folder, or a model on the Hub.
        library: `"timm"` or `"transformers"`; detected when None.
        token: For the Hub.

    Raises:
        UsageError: There is no such model, it cannot be reached, or its library is not supported.
    """
    if library is not None:
        check_library(library)
    path = Path(name).expanduser()
    if path.is_dir():
        return _local(name, path, library)
    if path.is_file():
        raise UsageError(f"{name!r} is a file. Name the folder of the model.")
    if os.path.isabs(path) or name.startswith((".", "~")) or name.count("/") > 1 or os.sep == "\\" and "\\" in name:
        raise MissingFileError(f"The folder {name!r} does not exist. Check the path.")
    return _on_hub(name, library, token)


def check_library(library: str) -> None:
    """Raise for a library that is not supported."""
    if library not in LIBRARIES:
        raise UsageError(
            f"--library_name {library} is not supported. Choose from {', '.join(LIBRARIES)}."
            + did_you_mean(library, list(LIBRARIES))
        )


def library_of(config: dict[str, Any]) -> str | None:
    """The library that wrote a `config.json`; None if it is unknown."""
    if "model_type" in config or "architectures" in config:
        return "transformers"
    return "timm" if "architecture" in config else None


def _local(name: str, folder: Path, library: str | None) -> ModelSource:
    from accel_cli.estimate.headers import weight_files

    if (folder / CONFIG_NAME).is_file():
        config = read_config(folder / CONFIG_NAME)
        found = library or library_of(config)
        if found is not None or weight_files(folder):
            return ModelSource(name, folder, found, config)
        raise UsageError(
            f"{folder / CONFIG_NAME} has neither a model_type, as for transformers, nor an architecture, as for timm. "
            "Give --library_name."
        )
    if library is None and weight_files(folder):
        return ModelSource(name, folder, None, {})
    raise UsageError(
        f"The folder {name!r} has no {CONFIG_NAME}" + (" and no safetensors files" if library is None else "")
        + ". Name the folder of a model."
    )  # fmt: skip


def _on_hub(name: str, library: str | None, token: str | None) -> ModelSource:
    from accel_cli.estimate.hub import download_config, model_library

    if library == "timm" and "/" not in name:  # timm's own model names
        return ModelSource(name, None, library, {"architecture": name})
    library = library or model_library(name, token)
    return ModelSource(name, None, library, download_config(name, token), token)
