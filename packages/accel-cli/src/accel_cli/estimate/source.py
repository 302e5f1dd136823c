"""Where a model comes from: a local folder, or the Hub; a library that builds it, or just files with tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_cli.errors import MissingFileError, UsageError, did_you_mean
from accel_cli.estimate.config_json import CONFIG_NAME, LIBRARIES, read_config


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was named.

    Attributes:
        name: As it was given.
        folder: The local folder; None for a model on the Hub.
        library: What builds it; None for a folder with safetensors files only.
        config: Content of its `config.json`, empty where that was not needed.
        token: For the Hub.
    """

    name: str
    folder: Path | None
    library: str | None
    config: dict[str, Any]
    token: str | None = None


def find_model(name: str, library: str | None = None, token: str | None = None) -> ModelSource:
    """Find out what a name stands for. A local folder is never looked up on the Hub.

    Args:
        name: A folder, or a model on the Hub.
        library: `"timm"` or `"transformers"`, where the user knows; guessed when None.
        token: For the Hub.

    Raises:
        UsageError: There is no such model, it cannot be reached, or it is of another library.
    """
    if library is not None:
        check_library(library)
    path = Path(name).expanduser()
    if path.is_dir():
        return _local(name, path, library)
    if path.is_file():
        raise UsageError(f"{name!r} is a file: name the folder it is in")
    if os.path.isabs(path) or name.startswith((".", "~")) or name.count("/") > 1 or os.sep == "\\" and "\\" in name:
        raise MissingFileError(f"The folder {name!r} does not exist: check the path")
    return _on_hub(name, library, token)


def check_library(library: str) -> None:
    """Refuse a library that cannot build models here."""
    if library not in LIBRARIES:
        raise UsageError(
            f"The library {library!r} is not one of {', '.join(LIBRARIES)}: models of others cannot be estimated."
            + did_you_mean(library, list(LIBRARIES))
        )


def library_of(config: dict[str, Any]) -> str | None:
    """Which library wrote a `config.json`; None for one that is not known."""
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
            f"{folder / CONFIG_NAME} names neither a model_type, as those of transformers do, nor an architecture, as "
            "those of timm: give --library_name"
        )
    if library is None and weight_files(folder):
        return ModelSource(name, folder, None, {})
    raise UsageError(
        f"The folder {name!r} has no {CONFIG_NAME}" + (" and no safetensors files" if library is None else "")
        + ": name the folder of a model"
    )  # fmt: skip


def _on_hub(name: str, library: str | None, token: str | None) -> ModelSource:
    from accel_cli.estimate.hub import download_config, model_library

    if library == "timm" and "/" not in name:  # what timm itself calls its models
        return ModelSource(name, None, library, {"architecture": name})
    library = library or model_library(name, token)
    return ModelSource(name, None, library, download_config(name, token), token)
