"""The manifest of a checkpoint: every file with its size and checksum, and which run wrote it."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accel_ops.files.checksum import checksum_file
from accel_ops.files.durable import DurableFile
from accel_ops.files.filenames import DATALOADER_NAME, MANIFEST_NAME, RNG_STATE_NAME, WINDOW_NAME
from accel_ops.files.owners import Owner
from accel_ops.files.serialization import load
from accel_ops.files.staging import path_inside

FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 28
MAX_VERIFYING_THREADS = 4


class DamagedCheckpointError(ValueError):
    """The files of a checkpoint are not those that were saved, so that another checkpoint should be loaded."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc32: str


def current_versions() -> dict[str, str]:
    """The versions that wrote a checkpoint, for finding out why it does not load."""
    return {"accelerate": version("accelerate"), "torch": str(torch.__version__), "python": platform.python_version()}


@dataclass(frozen=True)
class Manifest:
    """The files of a complete checkpoint, and facts about the run.

    Attributes:
        files: By relative name.
        world_size: How many processes saved.
        step: The accelerator's step counter.
        iteration: Number of the checkpoint under automatic naming.
        versions: Of the programs that wrote it.
        absent: Ranks that did not take part in the save, so that their RNG states are not among the files.
        token: Must be in the files that these ranks add later for them to be used.
        writer: The process that wrote it, as the name of an `accel_ops.files.owners.Owner`.
        finite: Whether the weights of all models are finite; True where it is not known.
    """

    files: Mapping[str, FileRecord]
    world_size: int
    step: int
    iteration: int
    versions: Mapping[str, str] = field(default_factory=current_versions)
    absent: Sequence[int] = ()
    token: str = ""
    writer: str = field(default_factory=lambda: Owner.this_process().name)
    finite: bool = True

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder and fsync it."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True)
        with DurableFile(folder / MANIFEST_NAME) as file:
            file.write(f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint; None where there is none.

        Raises:
            ValueError: It is damaged, forged, or of a newer format.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            return None
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, too many for a manifest. Load another checkpoint."
            )
        try:
            content = json.loads(path.read_bytes())
            found_format = content.pop("format")
            if found_format == FORMAT:
                return cls._from_json(content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}). Load another checkpoint, or delete this file to load "
                "the others unverified."
            ) from error
        raise ValueError(
            f"{path} has the format {found_format!r}, and this version reads only format {FORMAT}. Upgrade accelerate."
        )

    @classmethod
    def _from_json(cls, content: Mapping[str, Any]) -> Manifest:
        files = {}
        for name, record in content["files"].items():
            if type(record["size"]) is not int or not isinstance(record["crc32"], str):
                raise TypeError(f"{name!r} has the record {record!r}")
            files[name] = FileRecord(record["size"], record["crc32"])
        numbers = {key: content[key] for key in ("world_size", "step", "iteration")}
        for key, number in numbers.items():
            if type(number) is not int:
                raise TypeError(f"{key!r} is {number!r}")
        versions = {str(key): str(value) for key, value in content["versions"].items()}
        absent, token = content.get("absent", []), content.get("token", "")
        if not isinstance(token, str) or not all(type(rank) is int for rank in absent):
            raise TypeError(f"'absent' is {absent!r}, 'token' is {token!r}")
        writer = str(content.get("writer", ""))
        finite = content.get("finite", True) is not False
        return cls(files, versions=versions, absent=absent, token=token, writer=writer, finite=finite, **numbers)

    def check_sizes(self, folder: Path) -> None:
        """Check that every file exists and has its recorded size.

        Raises:
            ValueError: Naming the first that is not.
        """
        for name, record in self.files.items():
            path = path_inside(folder, name)
            try:
                size = os.stat(path).st_size if path.is_file() else None
            except OSError:
                size = None
            if size != record.size:
                problem = "is missing" if size is None else f"has {size} bytes"
                raise DamagedCheckpointError(
                    f"The checkpoint {folder} is not complete: {name!r} {problem}, its manifest says {record.size} bytes. "
                    "Load another checkpoint."
                )

    def check_contents(self, folder: Path, names: Collection[str]) -> None:
        """Compare the checksums of some files, several at a time.

        Raises:
            ValueError: Naming the first file whose content has changed.
        """
        order = sorted(names, key=lambda name: -self.files[name].size)
        num_threads = max(1, min(MAX_VERIFYING_THREADS, (os.cpu_count() or 1) - 1))  # one core is left to the reader
        with ThreadPoolExecutor(num_threads, "verify") as pool:
            checksums = pool.map(checksum_file, [path_inside(folder, name) for name in order])
            for name, checksum in zip(order, checksums, strict=True):
                if checksum != (expected := self.files[name].crc32):
                    raise DamagedCheckpointError(
                        f"The checkpoint {folder} is damaged: {name!r} has the checksum {checksum}, its manifest says "
                        f"{expected}. Load another checkpoint, or copy this one again."
                    )


def files_to_verify(names: Iterable[str], manifest: Manifest, index: int, count: int) -> list[str]:
    """The files that process `index` of `count` verifies, so that each is verified once and the work is balanced."""
    loads = [0] * count
    chosen = []
    for name in sorted(names, key=lambda name: (-manifest.files[name].size, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += manifest.files[name].size
        if lightest == index:
            chosen.append(name)
    return chosen


TOKEN_KEY = "checkpoint"


def late_files(folder: Path, ranks: Collection[int]) -> list[str]:
    """Names of the files in a folder that these ranks may have added."""
    if not ranks:
        return []
    pattern = re.compile(rf"(?:{RNG_STATE_NAME}_|{WINDOW_NAME}_|{DATALOADER_NAME}(?:_\d+)?_rank)(\d+)\.(?:pkl|bin)")
    matches = [(name, pattern.fullmatch(name)) for name in sorted(os.listdir(folder))]
    return [name for name, match in matches if match and int(match[1]) in ranks]


def added_by(folder: Path, manifest: Manifest | None, rank: int) -> list[str]:
    """Names of the files that a rank has added to this very checkpoint.

    Raises:
        ValueError: The file of its RNG states is damaged.
    """
    if manifest is None or rank not in manifest.absent:
        return []
    path = folder / f"{RNG_STATE_NAME}_{rank}.pkl"
    if not path.is_file() or path.is_symlink():
        return []
    state: Any = load(path, map_location="cpu")
    belongs = isinstance(state, dict) and state.get(TOKEN_KEY) == manifest.token
    return late_files(folder, [rank]) if belongs else []
