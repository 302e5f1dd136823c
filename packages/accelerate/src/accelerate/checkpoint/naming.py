"""Names of checkpoint folders."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from accel_ops.files.durable import fsync_folder
from accel_ops.files.filenames import MANIFEST_NAME
from accel_ops.files.owners import Owner
from accel_ops.files.staging import STAGING, remove_gone
from accelerate.checkpoint.manifest import Manifest

CHECKPOINTS_FOLDER = "checkpoints"
UNFINISHED = re.compile(rf"\.checkpoint_\d+\.{STAGING}")
REMOVING = re.compile(r"\.checkpoint_\d+\.removing")


def checkpoints_folder(project_dir: str | os.PathLike[str] | None) -> Path:
    """Where automatically named checkpoints are.

    Raises:
        ValueError: There is no project folder.
    """
    if project_dir is None:
        raise ValueError(
            "automatic_checkpoint_naming=True needs a project folder, but project_dir is None. Pass "
            "ProjectConfiguration(project_dir=...), or name the checkpoint's folder."
        )
    return Path(project_dir, CHECKPOINTS_FOLDER)


def numbered_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The automatically named checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    matches = [(re.fullmatch(r"checkpoint_(\d+)", path.name), path) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def number_after(folder: Path) -> int:
    """The number after the newest checkpoint in a folder; 0 where there is none, or it is of another job that may still run."""
    checkpoints = numbered_checkpoints(folder)
    if not checkpoints or living_writer(checkpoints[-1][1]) is not None:
        return 0
    return checkpoints[-1][0] + 1


def remove_oldest(newest: Path, total_limit: int, first_number: int = 0) -> list[Path]:
    """Remove checkpoints until `total_limit` are left, those with the lowest numbers first.

    Each is renamed before its files are deleted, so that no incomplete checkpoint is ever seen.

    Checkpoints of other jobs that may still run are kept and not counted. If the weights of all that are left are not finite, the
    newest one whose weights are is kept, too.

    Args:
        newest: The checkpoint just written, which is kept whatever its number.
        total_limit: At least 1.
        first_number: Lower ones are of an earlier run; they are kept and not counted.

    Returns:
        What was removed.
    """
    folder = newest.parent
    checkpoints = [path for number, path in numbered_checkpoints(folder) if number >= first_number]
    others = [path for path in checkpoints if path.name != newest.name and _is_ours(path)]
    num_surplus = max(0, len(others) + 1 - total_limit)
    surplus = others[:num_surplus]
    if surplus and not any(map(_has_finite_weights, [newest, *others[num_surplus:]])):
        last_finite = next(filter(_has_finite_weights, reversed(surplus)), None)
        surplus = [path for path in surplus if path != last_finite]
    for path in surplus:
        doomed = path.with_name(f".{path.name}.removing")
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            os.rename(path, doomed)
            fsync_folder(folder)
            shutil.rmtree(doomed)
        except FileNotFoundError:  # another job in the same folder removes it, too
            continue
    return surplus


def _is_ours(path: Path) -> bool:
    """Whether this job may remove a checkpoint: not one of another running job, nor just removed by one."""
    return living_writer(path) is None and path.is_dir()


def _has_finite_weights(path: Path) -> bool:
    """What the manifest of a checkpoint says; True where it says nothing, and False where it cannot be read."""
    try:
        manifest = Manifest.read(path)
    except (ValueError, OSError):
        return False
    return manifest is None or manifest.finite


def living_writer(path: Path) -> Owner | None:
    """The other job that has written a checkpoint, if it may still run."""
    try:
        manifest = Manifest.read(path)
    except (ValueError, OSError):
        return None
    owner = Owner.from_name(manifest.writer) if manifest is not None else None
    if owner is None or owner.is_this_process or not owner.may_be_alive(path / MANIFEST_NAME):
        return None
    return owner


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished folders of killed runs beside automatically named checkpoints, but none of running jobs."""
    remove_gone(folder, UNFINISHED)
    for name in os.listdir(folder) if folder.is_dir() else []:
        if REMOVING.fullmatch(name):
            shutil.rmtree(folder / name, ignore_errors=True)
