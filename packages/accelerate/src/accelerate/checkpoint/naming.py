"""Names of checkpoint folders, and of the files in them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from accel_ops.durable import fsync_folder
from accel_ops.filenames import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

CHECKPOINTS_FOLDER = "checkpoints"
LEFTOVER = re.compile(r"\.checkpoint_\d+\.(?:[0-9a-f]{8}\.saving|removing)")


def numbered(name: str, index: int) -> str:
    """The file of the object at `index` of its kind: `optimizer.bin`, `optimizer_1.bin`, ..."""
    stem, dot, extension = name.partition(".")
    return f"{stem}_{index}{dot}{extension}" if index else name


def weights_file(index: int, safe_serialization: bool) -> str:
    """The weights file of the model at `index`."""
    return numbered(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME, index)


def count_files(names: Collection[str], *patterns: str) -> int:
    """How many objects of a kind a checkpoint holds: the first index for which no pattern names a file."""
    index = 0
    while any(numbered(pattern, index) in names for pattern in patterns):
        index += 1
    return index


def checkpoints_folder(project_dir: str | os.PathLike[str] | None) -> Path:
    """Where automatically named checkpoints are.

    Raises:
        ValueError: There is no project folder.
    """
    if project_dir is None:
        raise ValueError(
            "automatic_checkpoint_naming=True needs a folder, but project_dir is None: pass "
            "ProjectConfiguration(project_dir=...) or name the checkpoint's folder"
        )
    return Path(project_dir, CHECKPOINTS_FOLDER)


def numbered_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The automatically named checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    matches = [(re.fullmatch(r"checkpoint_(\d+)", path.name), path) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def remove_oldest(newest: Path, total_limit: int) -> list[Path]:
    """Remove checkpoints until `total_limit` are left, those with the lowest numbers first.

    Each leaves its name before its files go, so that none is ever seen in part.

    Args:
        newest: The checkpoint just written, which stays whatever its number.
        total_limit: At least 1.

    Returns:
        What was removed.
    """
    folder = newest.parent
    others = [path for _, path in numbered_checkpoints(folder) if path.name != newest.name]
    surplus = others[: max(0, len(others) + 1 - total_limit)]
    for path in surplus:
        doomed = path.with_name(f".{path.name}.removing")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        fsync_folder(folder)
        shutil.rmtree(doomed)
    return surplus


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left in a folder of automatically named checkpoints."""
    if folder.is_dir():
        for name in os.listdir(folder):
            if LEFTOVER.fullmatch(name):
                shutil.rmtree(folder / name, ignore_errors=True)
