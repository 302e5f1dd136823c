"""A folder holds its old or its new content, whole, whatever happens in between."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_ops.files import owners, staging
from accel_ops.files.owners import Owner
from accel_ops.files.staging import JOURNAL, PUBLISHING, StagedFolder, path_inside, recover


def put(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_new_folder_appears_with_missing_parents(tmp_path: Path) -> None:
    staged = StagedFolder(tmp_path / "a" / "b")
    put(staged.path, x="1", sub__y="2")
    assert not (tmp_path / "a" / "b").exists()
    staged.publish()
    assert content(tmp_path / "a" / "b") == {"x": "1", "sub/y": "2"}
    assert os.listdir(tmp_path / "a") == ["b"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    staged = StagedFolder(tmp_path / "a")
    put(staged.path, x="1")
    staged.publish()
    assert content(tmp_path / "a") == {"x": "1"}


def test_old_content_is_swapped_for_new(tmp_path: Path) -> None:
    put(tmp_path / "a", x="old", gone="old")
    staged = StagedFolder(tmp_path / "a")
    put(staged.path, x="new")
    before = os.stat(staged.path).st_ino
    staged.publish(replaces=["x", "gone"])
    assert content(tmp_path / "a") == {"x": "new"}
    assert os.stat(tmp_path / "a").st_ino == before  # the folder itself is the new one
    assert os.listdir(tmp_path) == ["a"]


def test_files_of_others_stay(tmp_path: Path) -> None:
    put(tmp_path / "a", x="old", gone__y="old", log="theirs", logs__events="theirs")
    (tmp_path / "a" / "empty").mkdir()
    staged = StagedFolder(tmp_path / "a")
    put(staged.path, x="new", sub__z="new")
    before = os.stat(tmp_path / "a").st_ino
    staged.publish(replaces=["x", "gone/y"], last="x")
    assert content(tmp_path / "a") == {"x": "new", "sub/z": "new", "log": "theirs", "logs/events": "theirs"}
    assert sorted(os.listdir(tmp_path / "a")) == ["empty", "log", "logs", "sub", "x"]
    assert os.stat(tmp_path / "a").st_ino == before
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EBUSY])
def test_file_systems_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(first: Path, second: Path) -> None:
        raise OSError(code, "not here")

    monkeypatch.setattr(staging, "exchange_folders", refuse)
    put(tmp_path / "a", x="old", gone="old")
    staged = StagedFolder(tmp_path / "a")
    put(staged.path, x="new")
    staged.publish(replaces=["x", "gone"])
    assert content(tmp_path / "a") == {"x": "new"}


def test_an_exchange_that_fails_for_other_reasons_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(first: Path, second: Path) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(staging, "exchange_folders", fail)
    put(tmp_path / "a", x="old")
    staged = StagedFolder(tmp_path / "a")
    put(staged.path, x="new")
    with pytest.raises(OSError, match="broken disk"):
        staged.publish()
    staged.discard()
    assert content(tmp_path / "a") == {"x": "old"}
    assert os.listdir(tmp_path) == ["a"]


def test_a_mount_point_is_staged_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.os.path, "ismount", lambda path: Path(path) == tmp_path)
    for text in ("1", "2"):
        staged = StagedFolder(tmp_path)
        assert staged.path.parent == tmp_path
        put(staged.path, x=text)
        staged.publish()
        assert content(tmp_path) == {"x": text}
        assert os.listdir(tmp_path) == ["x"]


def test_the_working_folder_is_not_pulled_from_under_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(put(tmp_path, x="old"))
    staged = StagedFolder(".")
    put(staged.path, x="new")
    staged.publish()
    assert Path("x").read_text() == "new"


def test_an_empty_working_folder_stays_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    staged = StagedFolder(".")
    put(staged.path, x="new")
    staged.publish()
    assert Path("x").read_text() == "new"
    assert content(tmp_path) == {"x": "new"}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("old", [{}, {"x": "old"}])
def test_a_replaced_folder_keeps_its_mode_and_owner(tmp_path: Path, old: dict[str, str]) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    put(shared, **old)
    if os.geteuid() == 0:
        os.chown(shared, 1234, 5678)
    shared.chmod(0o2770)
    before = shared.stat()
    staged = StagedFolder(shared)
    put(staged.path, x="new")
    staged.publish(replaces=["x"])
    after = shared.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert (shared / "x").stat().st_gid == before.st_gid  # as a file that is written into it
    assert content(shared) == {"x": "new"}


def test_links_are_followed_to_the_folder(tmp_path: Path) -> None:
    put(tmp_path / "real", x="old")
    (tmp_path / "link").symlink_to("real")
    staged = StagedFolder(tmp_path / "link")
    put(staged.path, x="new")
    staged.publish()
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "real") == {"x": "new"}


def test_a_file_added_in_the_last_moment_is_carried_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = staging.exchange_folders

    def late(first: Path, second: Path) -> None:
        put(Path(second), late__log="theirs")
        exchange(first, second)

    monkeypatch.setattr(staging, "exchange_folders", late)
    put(tmp_path / "a", x="old")
    staged = StagedFolder(tmp_path / "a")
    put(staged.path, x="new")
    staged.publish()
    assert content(tmp_path / "a") == {"x": "new", "late/log": "theirs"}


def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_moves(tmp_path: Path) -> None:
    put(tmp_path / "a", x__inner="theirs", y="old")
    staged = StagedFolder(tmp_path / "a")
    put(staged.path, x="new", y="new")
    with pytest.raises(IsADirectoryError, match="there is a folder of that name"):
        staged.publish()
    assert content(tmp_path / "a") == {"x/inner": "theirs", "y": "old"}


def test_a_file_cannot_become_a_folder(tmp_path: Path) -> None:
    put(tmp_path, a="file")
    with pytest.raises(NotADirectoryError, match="a file has that name"):
        StagedFolder(tmp_path / "a")


def test_leftovers_of_killed_writers_go_and_those_of_others_stay(tmp_path: Path) -> None:
    put(tmp_path / ".a.0123abcd.saving", x="half")
    put(tmp_path / "a" / ".0123abcd.saving", x="half")
    put(tmp_path / ".b.0123abcd.saving", x="theirs")
    put(tmp_path / ".a.saving", x="theirs")
    StagedFolder(tmp_path / "a").discard()
    assert sorted(os.listdir(tmp_path)) == [".a.saving", ".b.0123abcd.saving", "a"]
    assert not os.listdir(tmp_path / "a")


OTHER_JOB = """
import sys
from accel_ops.files.staging import StagedFolder
staged = StagedFolder(sys.argv[1])
(staged.path / "x").write_text("of the other job")
print(staged.path.name, flush=True)
sys.stdin.read()
staged.publish(["x"])
"""


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is writing the folder `a`, until its input ends."""
    job = subprocess.Popen(
        [sys.executable, "-c", OTHER_JOB, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with job:
        yield job
        job.kill()


def first_line(job: subprocess.Popen[str]) -> str:
    assert job.stdout is not None
    return job.stdout.readline().strip()


def test_a_folder_that_another_process_writes_is_refused_with_its_name(
    other_job: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = first_line(other_job)
    monkeypatch.setattr(staging, "SECONDS_TO_WAIT", 0.1)
    with pytest.raises(BlockingIOError, match=rf"that process {other_job.pid} on \S+, since 20\d\d-.* is writing"):
        StagedFolder(tmp_path / "a")
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name / "x").read_text() == "of the other job"
    other_job.kill()
    other_job.wait()
    staged = StagedFolder(tmp_path / "a")  # nobody is there any more
    assert os.listdir(tmp_path) == [staged.path.name]
    staged.discard()


def test_another_process_that_finishes_is_waited_for(other_job: subprocess.Popen[str], tmp_path: Path) -> None:
    first_line(other_job)
    assert other_job.stdin is not None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(StagedFolder, tmp_path / "a")
        other_job.stdin.close()
        staged = waiting.result()
    assert content(tmp_path / "a") == {"x": "of the other job"}
    staged.discard()


def test_what_another_machine_may_be_writing_stays_until_it_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = replace(Owner.this_process(), host="node7", machine="0123abcd")
    left = put(tmp_path / f".a.{elsewhere.name}.0123abcd.saving", x="half")
    assert list(staging.remove_leftovers(tmp_path / "a").values()) == [elsewhere]
    monkeypatch.setattr(staging, "QUIET_SECONDS", 0.2)
    StagedFolder(tmp_path / "a").discard()  # it was waited for, and did not move
    assert not left.exists()

    left = put(tmp_path / f".a.{elsewhere.name}.0123abcd.saving", x="half")
    os.utime(left, (0, 0))
    assert not staging.remove_leftovers(tmp_path / "a")
    assert not left.exists()


def test_a_later_process_of_the_same_number_is_another_one(tmp_path: Path) -> None:
    earlier = replace(Owner.this_process(), started=1)
    put(tmp_path / f".a.{earlier.name}.0123abcd.saving", x="half")
    assert not staging.remove_leftovers(tmp_path / "a")
    assert not os.listdir(tmp_path)


def test_what_this_process_has_forgotten_is_removed(tmp_path: Path) -> None:
    StagedFolder(tmp_path / "a")
    gc.collect()
    staged = StagedFolder(tmp_path / "a")
    assert os.listdir(tmp_path) == [staged.path.name]
    staged.discard()


def test_a_writer_shows_that_it_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.01)
    staged = StagedFolder(tmp_path / "a")
    os.utime(staged.path, (0, 0))
    while staged.path.stat().st_mtime == 0:
        time.sleep(0.001)
    staged.discard()


def test_an_interrupted_publication_is_finished(tmp_path: Path) -> None:
    put(tmp_path, x="old", gone="old", log="theirs")
    publishing = put(tmp_path / PUBLISHING, x="new", sub__z="new")
    (publishing / JOURNAL).write_text(json.dumps({"move": ["moved already", "sub/z", "x"], "remove": ["gone"]}))
    assert recover(tmp_path)
    assert content(tmp_path) == {"x": "new", "sub/z": "new", "log": "theirs"}
    assert not recover(tmp_path)


def test_only_the_empty_folder_may_be_left_to_remove(tmp_path: Path) -> None:
    (tmp_path / PUBLISHING / "sub").mkdir(parents=True)
    assert recover(tmp_path)
    put(tmp_path / PUBLISHING, x="not ours")
    assert not recover(tmp_path)
    assert content(tmp_path) == {f"{PUBLISHING}/x": "not ours"}


@pytest.mark.parametrize("journal", ["", "[]", "{}", '{"move": 3, "remove": []}', '{"move": [3], "remove": []}'])
def test_a_damaged_journal_is_reported(tmp_path: Path, journal: str) -> None:
    put(tmp_path / PUBLISHING, x="new")
    (tmp_path / PUBLISHING / JOURNAL).write_text(journal)
    with pytest.raises(ValueError, match="do not use it|cannot be read"):
        recover(tmp_path)
    assert (tmp_path / PUBLISHING / "x").exists()


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/", "./a", "C:x", "a\\..\\b", "a\0b", 3, None],
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ValueError, match="do not use it"):
        path_inside(tmp_path, name)


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir(), outside.mkdir()
    (inside / "link").symlink_to(outside)
    with pytest.raises(ValueError, match="a symbolic link leads out"):
        path_inside(inside, "link/x")
    assert path_inside(inside, "sub/x") == inside / "sub" / "x"
