"""Files appear in full or not at all, and are on the disk when a call returns."""

from __future__ import annotations

import array
import errno
import importlib.util
import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_ops.files import checksum, durable
from accel_ops.files.checksum import checksum_file
from accel_ops.files.durable import DurableFile, exchange_folders, make_folder, write_atomically
from accel_ops.files.owners import Owner


@pytest.mark.parametrize("num_bytes", [0, 10, 3 << 20])
def test_size_and_checksum_are_those_of_the_file(tmp_path: Path, num_bytes: int) -> None:
    content = os.urandom(num_bytes)
    with DurableFile(tmp_path / "x") as file:
        assert file.write(content) == num_bytes
        file.write(array.array("d", [1.0]))
        file.flush()
    whole = content + array.array("d", [1.0]).tobytes()
    assert (tmp_path / "x").read_bytes() == whole
    file.close()  # again is harmless
    assert file.num_bytes == len(whole)
    assert file.checksum == checksum_file(tmp_path / "x") == f"{zlib.crc32(whole):08x}"


def test_checksums_take_the_processors_instructions_where_there_is_a_wheel() -> None:
    if importlib.util.find_spec("isal") is None:
        pytest.skip("isal is not installed: it has no wheel for this machine")
    assert checksum.crc32.__module__ == "isal.isal_zlib"


def test_without_isal_checksums_are_the_same(tmp_path: Path) -> None:
    content = os.urandom(3 << 18)
    (tmp_path / "x").write_bytes(content)
    check = (
        "import sys; sys.modules['isal'] = sys.modules['isal.isal_zlib'] = None\n"
        "from accel_ops.files.checksum import checksum_file, crc32\n"
        "assert crc32.__module__ == 'zlib'; print(checksum_file(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == checksum_file(tmp_path / "x")


def test_a_full_disk_is_reported_on_closing_whatever_was_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "write", full)

    def serialize() -> None:
        with DurableFile(tmp_path / "x") as file:
            assert file.write(bytes(3 << 20)) == 3 << 20
            file.write(bytes(3 << 20))
            file.write(b"dropped")
            raise RuntimeError("unexpected position")

    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'x'}'"):
        serialize()


@pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are a matter of Unix")
@pytest.mark.parametrize(("num_bytes", "durable"), [(200_000, True), (3 << 20, True), (200_000, False)])
def test_a_file_that_may_not_grow_is_named(tmp_path: Path, num_bytes: int, durable: bool) -> None:
    write = f"""
import resource, signal
from accel_ops.files.durable import write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with write_atomically({str(tmp_path / "weights")!r}, durable={durable}) as file:
        file.write(bytes({num_bytes}))
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", write], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[Errno {errno.EFBIG}] File too large: '{tmp_path / 'weights'}'"
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, *data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in ("write", "fsync"):
        file = DurableFile(tmp_path / step)
        file.write(b"small")
        with monkeypatch.context() as patch:
            patch.setattr(durable.os, step, full)
            with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / step}'"):
                file.close()


def test_an_existing_file_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("kept")
    with pytest.raises(FileExistsError):
        DurableFile(tmp_path / "x")


def test_an_atomic_write_replaces_content_and_keeps_the_mode(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    target.chmod(0o640)
    with write_atomically(target) as file:
        file.write(b"new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_failed_atomic_write_changes_nothing(tmp_path: Path, durable: bool) -> None:
    (tmp_path / "x").write_text("old")

    def write_half() -> None:
        with write_atomically(tmp_path / "x", durable=durable) as file:
            file.write(b"ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_half()
    assert (tmp_path / "x").read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with write_atomically(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_devices_are_written_to_directly() -> None:
    with write_atomically("/dev/null") as file:
        file.write(b"gone")
    assert not Path("/dev/null").is_file()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="Name a file in it"), write_atomically(tmp_path):
        pass


def test_leftovers_of_killed_writers_are_removed_and_those_of_others_kept(tmp_path: Path) -> None:
    dead = next(number for number in range(4_000_000, 4_100_000) if not Path(f"/proc/{number}").exists())
    us = Owner.this_process()
    them = replace(us, process=dead)
    elsewhere = replace(them, machine="0123abcd")
    of_living = f".x.{replace(us, process=1, started=0).name}.0123abcd.writing"
    old = f".x.{elsewhere.name}.abcd0123.writing"
    gone = [f".x.{owner.name}.0123abcd.writing" for owner in (us, them)] + [old]
    kept = [of_living, f".x.{elsewhere.name}.0123abcd.writing", f".y.{them.name}.0123abcd.writing", ".x.writing"]
    for name in gone + kept:
        (tmp_path / name).touch()
    os.utime(tmp_path / old, (0, 0))
    with write_atomically(tmp_path / "x") as file, write_atomically(tmp_path / "x") as other:
        file.write(b"1")
        other.write(b"2")
    assert sorted(os.listdir(tmp_path)) == sorted(["x", *kept])


def test_new_folders_reach_the_disk_with_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "fsync_folder", lambda path: synced.append(Path(path)))
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]


def test_folders_swap_names(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange_folders(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["b"]
    assert os.listdir(tmp_path / "b") == ["a"]
    with pytest.raises(OSError, match="No such file") as caught:
        exchange_folders(tmp_path / "a", tmp_path / "none")
    assert caught.value.errno == errno.ENOENT


def test_systems_without_exchange_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable.sys, "platform", "darwin")
    with pytest.raises(OSError, match="cannot exchange") as caught:
        exchange_folders(tmp_path, tmp_path)
    assert caught.value.errno == errno.ENOSYS
