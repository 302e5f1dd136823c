"""Writing a checkpoint on all processes, so that it appears complete or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from accel_integrations.training_state.interface import FileWriter
from accel_ops.collectives.agreement import Ranks, Storage
from accel_ops.files.checksum import checksum_file
from accel_ops.files.durable import DurableFile, fsync_file
from accel_ops.files.filenames import MANIFEST_NAME
from accel_ops.files.serialization import serialize
from accel_ops.files.staging import StagedFolder, list_files
from accelerate.checkpoint.manifest import FileRecord, Manifest, late_files


class StagedWriter:
    """Writes files into a staging folder.

    Args:
        folder: The staging folder.
        disk: Fsyncs one file while the next is being written; without it, each is fsynced before the next.

    Attributes:
        records: Size and checksum of every file written.
    """

    def __init__(self, folder: Path, disk: ThreadPoolExecutor | None = None) -> None:
        self.folder = folder
        self.records: dict[str, FileRecord] = {}
        self._disk = disk
        self._pending: list[Future[None]] = []

    def save(self, name: str, obj: Any, safe_serialization: bool = False) -> None:
        """Write one file; `finish` waits until it is fsynced."""
        sync = None if self._disk is None else partial(self._start, self._disk, _sync_and_close)
        with DurableFile(self.folder / name, sync=sync) as file:
            serialize(obj, file, safe_serialization)
        self.records[name] = FileRecord(file.num_bytes, file.checksum)

    def save_sharded(self, name: str, state: dict[str, Any]) -> None:
        """Write this rank's shards of a state into a folder."""
        from accel_integrations.training_state.formats.shard_writing import write_sharded

        self.adopt(write_sharded(self.folder, name, state))

    def adopt(self, names: Iterable[str]) -> None:
        """Fsync and record files that an engine wrote into the folder."""
        for name in names:
            path = self.folder / name
            if self._disk is None:
                fsync_file(path)
            else:
                self._start(self._disk, fsync_file, path)
            self.records[name] = FileRecord(path.stat().st_size, checksum_file(path))

    def finish(self) -> dict[str, FileRecord]:
        """Wait until all files are fsynced and return the records.

        Raises:
            OSError: A file could not be fsynced.
        """
        for pending in self._pending:
            pending.result()
        return self.records

    def _start(self, disk: ThreadPoolExecutor, sync: Callable[[Any], None], what: Any) -> None:
        self._pending.append(disk.submit(sync, what))


class Transaction:
    """An unpublished checkpoint. Leaving the `with` block before `publish` succeeded removes what was written.

    Args:
        ranks: The processes that write it.
        storage: Who writes what.
        target: The folder of the published checkpoint.

    Attributes:
        folder: Where this process writes.
        token: Written into files that absent ranks add later; empty when all ranks take part.
        key: A name of this transaction, the same on all ranks and different from that of any other.
    """

    def __init__(self, ranks: Ranks, storage: Storage, target: Path) -> None:
        self.token = secrets.token_hex(8) if ranks.absent else ""
        self._ranks = ranks
        self._overlaps = True
        self._storage = storage
        self._target = target
        self._staged: StagedFolder | None = None
        self._records: dict[str, FileRecord] = {}
        try:
            # Every owner of a file system makes a staging folder; the other ranks of its machine are told the path.
            paths = ranks.together(f"begin the checkpoint {target}", self._begin)
        except BaseException:
            self._discard()
            raise
        self.folder = Path(paths[storage.owner] or "")
        self.key = os.path.basename(paths[0] or "")

    def _begin(self) -> str | None:
        if self._storage.is_owner:
            self._staged = StagedFolder(self._target)
            return os.fspath(self._staged.path)
        return None

    def continue_in_thread(self, ranks: Ranks) -> None:
        """Leave what follows to a background thread.

        Args:
            ranks: The same processes, which agree without collectives.
        """
        self._ranks = ranks
        self._overlaps = False  # an executor starts nothing once the interpreter waits for the last threads

    def write(self, write: Callable[[FileWriter], None]) -> None:
        """Have every process write its files.

        Raises:
            Exception: On all processes, when one could not.
        """

        def work() -> tuple[int, dict[str, FileRecord]]:
            with ThreadPoolExecutor(1, "fsync") if self._overlaps else nullcontext() as disk:
                files = StagedWriter(self.folder, disk)
                write(files)
            return self._storage.owner, files.finish()

        for owner, records in self._ranks.together(f"write its files of the checkpoint {self._target}", work):
            if owner == self._storage.owner:
                self._records |= records

    def publish(self, step: int, iteration: int, finite: bool) -> None:
        """Write the manifest, with these facts, and rename the staging folder to the target.

        Raises:
            Exception: On all processes, when one could not.
        """
        staged = self._staged

        def describe() -> None:
            if staged is not None:
                self._describe(step, iteration, finite)

        def publish() -> None:
            if staged is not None:
                staged.publish(_names_of(staged.target), last=MANIFEST_NAME)

        # Two agreements: no machine renames its folder before the manifests of all are on the disk.
        self._ranks.together(f"complete the checkpoint {self._target}", describe)
        self._ranks.together(f"publish the checkpoint {self._target}", publish)
        self._staged = None

    def _describe(self, step: int, iteration: int, finite: bool) -> None:
        for name in list_files(self.folder):  # what hooks wrote
            if name not in self._records:
                path = self.folder / name
                fsync_file(path)
                self._records[name] = FileRecord(path.stat().st_size, checksum_file(path))
        world_size = self._ranks.count + len(self._ranks.absent)
        absent = self._ranks.absent
        manifest = Manifest(self._records, world_size, step, iteration, absent=absent, token=self.token, finite=finite)
        manifest.write(self.folder)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        if self._staged is not None:
            self._staged.discard()


def _names_of(folder: Path) -> list[str]:
    """The files of the checkpoint that is in a folder now, if it has a manifest."""
    try:
        manifest = Manifest.read(folder)
    except ValueError:
        manifest = None
    return [*manifest.files, *late_files(folder, manifest.absent), MANIFEST_NAME] if manifest else [MANIFEST_NAME]


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
