"""Finding the files of a checkpoint: one file, a folder, an index of shards, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ops.files.filenames import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from accel_ops.files.staging import path_inside
from accel_state.errors import missing_library

INDEX_ENDING = ".index.json"
PLAIN_INDEX_ENDING = "index.json"  # the offload folder of a model may have such a file too
FILE_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_CHOICES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint.

    Args:
        files: Their paths, in the order in which they are read.
        weight_map: File by tensor name, as in the index; empty without an index.
        source: The path or name that was given, for messages.
    """

    files: tuple[Path, ...]
    weight_map: dict[str, Path] = field(default_factory=dict)
    source: str = ""


def find_checkpoint(checkpoint: StrPath) -> CheckpointFiles:
    """Find the files of a checkpoint, given its path or the name of a Hub repository.

    Args:
        checkpoint: A weights file; an index (`*.json`); a folder with `model.safetensors`, one `*.index.json`,
            `pytorch_model.bin` or one `index.json`, in this order; or a name such as "openai-community/gpt2" where there is no such path.

    Returns:
        The files, which all exist.

    Raises:
        ValueError: It is none of these, the folder has several indexes, or an index is damaged or names files outside
            its folder.
        FileNotFoundError: An index names files that are missing.
        ImportError: It is a name, and huggingface_hub is not installed.
    """
    path = Path(checkpoint)
    source = os.fspath(checkpoint)
    if path.is_dir():
        return _in_folder(path, source)
    if path.is_file():
        return _read_index(path, source) if path.suffix == ".json" else CheckpointFiles((path,), {}, source)
    if isinstance(checkpoint, str) and HUB_ID.fullmatch(source) and not source.endswith(FILE_ENDINGS):
        return _from_hub(source)
    raise ValueError(
        f"There is no checkpoint {source!r}: give the path of a weights file, of an index, or of a folder that holds them."
    )


def _in_folder(folder: Path, source: str) -> CheckpointFiles:
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return CheckpointFiles((folder / SAFE_WEIGHTS_NAME,), {}, source)
    if index := _only_index(folder, INDEX_ENDING, source):
        return _read_index(index, source)
    if (folder / WEIGHTS_NAME).is_file():
        return CheckpointFiles((folder / WEIGHTS_NAME,), {}, source)
    if index := _only_index(folder, PLAIN_INDEX_ENDING, source):
        return _read_index(index, source)
    others = sorted(name for name in os.listdir(folder) if name.endswith(FILE_ENDINGS[:-1]))
    hint = f" Give the path of the file itself if one of these is meant: {', '.join(others)}." if others else ""
    raise ValueError(
        f"The folder {source} holds no checkpoint: neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME} nor an index of shards "
        f"(*{PLAIN_INDEX_ENDING}).{hint}"
    )


def _only_index(folder: Path, ending: str, source: str) -> Path | None:
    """The index in a folder; None when there is none."""
    indexes = sorted(name for name in os.listdir(folder) if name.endswith(ending))
    if len(indexes) > 1:
        raise ValueError(
            f"{source} holds several indexes, {', '.join(indexes)}: give the path of the one to load, or remove the "
            "others."
        )
    return folder / indexes[0] if indexes else None


def read_weight_map(path: Path) -> dict[str, str]:
    """File name by tensor name, as an index has it.

    Args:
        path: A JSON file with such an object, or with one as its `weight_map`.

    Raises:
        ValueError: It cannot be read as an index.
    """
    try:
        index: Any = json.loads(path.read_bytes())
        weight_map = index.get("weight_map", index)
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("it does not map each tensor to a file name")
    except (ValueError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else "it is neither a weight_map nor has one"
        raise ValueError(f"{path} is not a checkpoint index ({reason}). Download or write it again.") from error
    return dict(weight_map)


def _read_index(path: Path, source: str) -> CheckpointFiles:
    weight_map = read_weight_map(path)
    shards = {name: path_inside(path.parent, name) for name in dict.fromkeys(weight_map.values())}
    absent = [name for name, file in shards.items() if not file.is_file()]
    if absent:
        raise FileNotFoundError(
            f"{path} names {len(shards)} files, of which {len(absent)} are missing: {_listed(absent)}. Download or copy "
            "the checkpoint again, with all its shards."
        )
    return CheckpointFiles(
        tuple(shards.values()), {tensor: shards[name] for tensor, name in weight_map.items()}, source
    )


def _from_hub(repository: str) -> CheckpointFiles:
    """Download the files of a repository's checkpoint; those in the cache are not downloaded again."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise missing_library(
            "huggingface_hub", why=f"There is no path {repository!r}, and loading from the Hub"
        ) from error

    def download(name: str) -> Path:
        return Path(hf_hub_download(repository, name))

    reasons: list[Exception] = []
    for name in HUB_CHOICES:
        try:
            return _with_shards(download(name), download, repository)
        except EntryNotFoundError as error:  # try the next file name
            reasons.append(error)
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            reasons.append(error)
            break
    reason = str(reasons[-1]).strip().partition("\n")[0]
    raise ValueError(
        f"{repository!r} is not a path, and no checkpoint of this name could be downloaded from the Hub ({reason}). Check the "
        "spelling; a path begins with ./ or /."
    ) from reasons[-1]


def _with_shards(first: Path, download: Callable[[str], Path], repository: str) -> CheckpointFiles:
    if not first.name.endswith(INDEX_ENDING):
        return CheckpointFiles((first,), {}, repository)
    weight_map = read_weight_map(first)
    for name in weight_map.values():
        path_inside(first.parent, name)  # before anything is downloaded under such a name
    for name in dict.fromkeys(weight_map.values()):
        download(name)
    return _read_index(first, repository)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
