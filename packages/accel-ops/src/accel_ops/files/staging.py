"""Replacing what a folder holds so that, whatever happens, either the old or the new content is there in full.

New content is written into a *staging* folder and then published under the folder's name:

- The name is free: the staging folder is renamed. Otherwise it has the owner, group and mode of the folder that it replaces.
- The folder holds nothing but the old content: the two folders swap names in one step, and the old one is removed.
- The folder also holds files of others, or it cannot be swapped (a mount point, a file system or operating system
  without that operation): the staging folder is renamed to `.publishing` inside it, which is the moment of publication,
  and its files are then moved into place. If that is interrupted, `recover` finishes it; who reads such a folder calls
  `recover` first.

The name of a staging folder says whose it is. One whose process is gone is removed by the next writer; one whose process
is at work is waited for, since two cannot replace the same folder at once.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from accel_ops.files.durable import DurableFile, StrPath, exchange_folders, fsync_folder, make_folder
from accel_ops.files.owners import Heartbeat, Owner

PUBLISHING = ".publishing"
JOURNAL = ".journal.json"
STAGING = r"(?:(?P<owner>[\w-]+)\.)?(?P<token>[0-9a-f]{8})\.saving"
SECONDS_TO_WAIT = 60.0
"""How long to wait for another writer of the same folder."""
QUIET_SECONDS = 90.0
"""After so long without a heartbeat, a writer on another machine is considered dead by a process that waits for it."""
PAUSE_SECONDS = 0.05

_at_work: weakref.WeakValueDictionary[str, StagedFolder] = weakref.WeakValueDictionary()  # of this process, by token
CANNOT_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EBUSY, errno.EXDEV, errno.ENOTSUP, errno.EPERM})


def path_inside(folder: StrPath, name: str) -> Path:
    """The path of a file named in a manifest, index or journal, which must lie inside the folder.

    Args:
        folder: Where the file must be.
        name: A relative path with forward slashes, from a source that is not trusted.

    Raises:
        ValueError: The name is not a plain relative path, or leads out of the folder through a symbolic link.
    """
    plain = isinstance(name, str) and bool(name) and "\\" not in name and ":" not in name and "\0" not in name
    if not plain or PurePosixPath(name).is_absolute() or {"..", "."} & set(name.split("/")) or "" in name.split("/"):
        raise ValueError(
            f"{os.fspath(folder)} names a file {name!r}, which is not a plain path inside it: do not use it"
        )
    path = Path(folder, name)
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder)):
        raise ValueError(
            f"{os.fspath(folder)} names a file {name!r}, which a symbolic link leads out of it: do not use it"
        )
    return path


def list_files(folder: StrPath) -> list[str]:
    """Sorted relative paths of all files below a folder, with forward slashes; links are not followed."""
    return sorted(
        Path(parent, name).relative_to(folder).as_posix() for parent, _, names in os.walk(folder) for name in names
    )


class StagedFolder:
    """The new content of a folder while it is written.

    Args:
        target: The folder to be; it may exist.

    Attributes:
        path: The folder to write to, with `DurableFile` or an `fsync_file` afterwards.
        target: The folder to be, without links.

    Raises:
        NotADirectoryError: There is a file of that name.
        BlockingIOError: Another process is writing the same folder and does not finish; the message names it.

    Example:
        ```python
        staged = StagedFolder("weights")
        with DurableFile(staged.path / "a.bin") as file:
            file.write(content)
        staged.publish(replaces=["a.bin", "b.bin"])
        ```
    """

    def __init__(self, target: StrPath) -> None:
        self.target = Path(os.path.realpath(target))
        if self.target.exists() and not self.target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Cannot write a folder: a file has that name", str(target))
        self._inside = self.target.is_dir() and (
            os.path.ismount(self.target) or not os.access(self.target.parent, os.W_OK)
        )
        self.path = self._begin()
        try:
            recover(self.target)
        except BaseException:
            self.discard()
            raise
        if self.target.is_dir() and not self._inside:
            _copy_access(self.target, self.path)
        self._heartbeat = Heartbeat(self.path)
        weakref.finalize(self, self._heartbeat.stop)

    def _begin(self) -> Path:
        """Create the staging folder, when no other process has one for the target."""
        home = self.target if self._inside else make_folder(self.target.parent)
        prefix = "" if self._inside else f".{self.target.name}"
        begin, beats = time.monotonic(), _Beats()
        while True:
            token = secrets.token_hex(4)
            path = home / f"{prefix}.{Owner.this_process().name}.{token}.saving"
            _at_work[token] = self
            path.mkdir()
            others = remove_leftovers(self.target, beats)
            others.pop(path, None)
            if not others:
                return path
            path.rmdir()
            del _at_work[token]
            other, owner = next(iter(others.items()))
            if time.monotonic() - begin > SECONDS_TO_WAIT and beats.is_certain(other, owner):
                raise BlockingIOError(
                    errno.EWOULDBLOCK,
                    f"Cannot write a folder that {owner} is writing: give each job a folder of its own, or stop the other",
                    os.fspath(self.target),
                )
            # Not the global generator: programs seed it, with the same number in every run.
            time.sleep(PAUSE_SECONDS * (1 + random.SystemRandom().random()))

    def publish(self, replaces: Collection[str] = (), last: str | None = None) -> None:
        """Replace the old content by the new one; all its files must be synced already.

        Args:
            replaces: Names of files the old content may consist of. Other files in the folder are kept.
            last: Name of the file that describes the others, to be moved last where files move one by one.

        Raises:
            OSError: It was not possible; the old content is complete.
        """
        names = list_files(self.path)
        for parent in sorted({Path(self.path, name).parent for name in names}):
            fsync_folder(parent)
        fsync_folder(self.path)
        if self._inside or self.target.is_dir():  # even an empty one may be the working directory of a process
            self._replace(names, frozenset(replaces) | set(names), last)
        else:
            os.rename(self.path, self.target)
        self._end()
        fsync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove what was written; nothing is published."""
        self._end()
        shutil.rmtree(self.path, ignore_errors=True)

    def _end(self) -> None:
        if (heartbeat := getattr(self, "_heartbeat", None)) is not None:
            heartbeat.stop()

    def _replace(self, names: Sequence[str], replaces: frozenset[str], last: str | None) -> None:
        if not self._inside and not self._must_stay(replaces):
            try:
                exchange_folders(self.path, self.target)
            except OSError as error:
                if error.errno not in CANNOT_EXCHANGE:
                    raise
            else:
                fsync_folder(self.target.parent)
                self._remove_old(replaces)
                return
        order = sorted(names, key=lambda name: (name == last, name))
        for name in order:
            if path_inside(self.target, name).is_dir():
                raise IsADirectoryError(
                    errno.EISDIR, "Cannot write a file: there is a folder of that name", str(self.target / name)
                )
        journal = {"move": order, "remove": sorted(replaces - set(names))}
        with DurableFile(self.path / JOURNAL) as file:
            file.write(json.dumps(journal).encode())
        fsync_folder(self.path)
        os.rename(self.path, self.target / PUBLISHING)  # from here on, the new content is valid
        fsync_folder(self.target)
        recover(self.target)

    def _remove_old(self, replaces: frozenset[str]) -> None:
        """Remove the old content after the swap, except for files that were added to it meanwhile, which are kept."""
        for entry in list(_entries(self.path)):
            if entry not in replaces and not os.path.lexists(self.target / entry):
                make_folder((self.target / entry).parent)
                os.replace(self.path / entry, self.target / entry)
        shutil.rmtree(self.path, ignore_errors=True)

    def _must_stay(self, replaces: frozenset[str]) -> bool:
        """True when the folder itself must not be swapped: it holds other files, or is a working directory."""
        here = Path(os.path.realpath(os.curdir))
        return here.is_relative_to(self.target) or any(entry not in replaces for entry in _entries(self.target))


def _copy_access(source: Path, folder: Path) -> None:
    """Give a folder that is to stand in for another one its owner, group, mode and access lists, which its files inherit."""
    status = source.stat()
    with suppress(AttributeError):  # Windows has no such owners
        for owner in (status.st_uid, -1):  # only root may give a folder away; a group may be any that one is in
            with suppress(OSError):
                os.chown(folder, owner, status.st_gid)
                break
    with suppress(OSError):
        shutil.copystat(source, folder)


def recover(target: StrPath) -> bool:
    """Finish an interrupted publication.

    Args:
        target: A folder, which need not exist.

    Returns:
        True when there was something to finish.

    Raises:
        ValueError: The journal of the interrupted publication is damaged or forged.
        OSError: The files cannot be moved, for example because the folder is read-only.
    """
    publishing = Path(target, PUBLISHING)
    if publishing.is_symlink() or not publishing.is_dir():
        return False
    journal = publishing / JOURNAL
    if journal.exists():
        moves, removals = _read_journal(journal)
        paths = [(path_inside(publishing, name), path_inside(target, name)) for name in moves]
        doomed = [path_inside(target, name) for name in removals]
        for source, destination in paths:
            if os.path.lexists(source):
                make_folder(destination.parent)
                with suppress(FileNotFoundError):  # another process has just recovered the folder
                    os.replace(source, destination)
        for path in doomed:
            path.unlink(missing_ok=True)
            _remove_empty_parents(path, Path(target))
        for folder in sorted({destination.parent for _, destination in paths} | {Path(target)}):
            fsync_folder(folder)
        journal.unlink(missing_ok=True)
    elif list_files(publishing):
        return False  # not our journal, which is removed only after the last file has moved
    shutil.rmtree(publishing, ignore_errors=True)
    fsync_folder(target)
    return True


class _Beats:
    """Heartbeats of processes on other machines, as seen by a process that waits."""

    def __init__(self) -> None:
        self._first: dict[Path, tuple[int, float]] = {}

    def has_stopped(self, path: Path) -> bool:
        """Whether there was none for so long that the process is considered dead."""
        touched, since = self._seen(path)
        return not touched and since > QUIET_SECONDS

    def is_certain(self, path: Path, owner: Owner) -> bool:
        """Whether a process is known to be alive, rather than not known to be dead."""
        return owner.is_here or self._seen(path)[0]

    def _seen(self, path: Path) -> tuple[bool, float]:
        """Whether the folder was touched since it was first looked at, and how long ago that was."""
        try:
            now = path.stat().st_mtime_ns
        except OSError:
            return False, 0.0
        first, begin = self._first.setdefault(path, (now, time.monotonic()))
        return now != first, time.monotonic() - begin


def remove_leftovers(target: StrPath, beats: _Beats | None = None) -> dict[Path, Owner]:
    """Remove the staging folders of processes that were killed while they wrote `target`.

    Args:
        target: The folder.
        beats: Heartbeats seen of processes on other machines, by who waits for them.

    Returns:
        The staging folders for the same target that processes may still be writing, with these processes.
    """
    folder = Path(target)
    beside = re.compile(rf"\.{re.escape(folder.name)}\.{STAGING}")
    inside = re.compile(rf"\.{STAGING}")
    return {
        **remove_gone(folder.parent, beside, beats),
        **remove_gone(folder, inside, beats),
    }


def remove_gone(home: Path, pattern: re.Pattern[str], beats: _Beats | None = None) -> dict[Path, Owner]:
    """Remove unfinished files that dead processes were writing in a folder.

    Args:
        home: The folder; it need not exist.
        pattern: Of names; its groups "owner" and "token" are those of `STAGING`.
        beats: Heartbeats seen of processes on other machines.

    Returns:
        The unfinished files of processes that may be alive, with these processes.
    """
    living = {}
    for entry in os.listdir(home) if home.is_dir() else []:
        if not (match := pattern.fullmatch(entry)):
            continue
        path, owner = home / entry, Owner.from_name(match["owner"] or "")
        if owner is not None and owner.is_this_process:
            at_work = match["token"] in _at_work
        else:
            at_work = (
                owner is not None
                and owner.may_be_alive(path)
                and not (beats is not None and not owner.is_here and beats.has_stopped(path))
            )
        if at_work and owner is not None:
            living[path] = owner
        else:
            shutil.rmtree(path, ignore_errors=True)
    return living


def _read_journal(path: Path) -> tuple[list[str], list[str]]:
    try:
        journal = json.loads(path.read_bytes())
        return list(journal["move"]), list(journal["remove"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): it is the journal of an interrupted save. Move its folder away and load "
            "an earlier checkpoint"
        ) from error


def _entries(folder: Path) -> Iterator[str]:
    """All files below a folder, and its empty folders and links to folders, by relative name."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        alone = [] if files or folders or Path(parent) == folder else [""]
        for name in (*files, *links, *alone):
            yield Path(parent, name).relative_to(folder).as_posix()


def _remove_empty_parents(path: Path, stop: Path) -> None:
    for parent in path.parents:
        if parent == stop or not parent.is_dir() or any(parent.iterdir()):
            return
        parent.rmdir()
