"""Attacks on whoever loads a checkpoint. Each is a small function that spoils a good one in place.

None may run code, reach outside the folder, take much memory or change the run; each ends in one error that names the
file.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ops.files.checksum import checksum_file
from accel_ops.files.staging import JOURNAL, PUBLISHING
from tests.support.keeping import Kept, make_kept

Attack = Callable[[Path], None]


# ---- tools of the attacker --------------------------------------------------------------------------------------


class Payload:
    """Unpickling this calls a function of the attacker's choice."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


def make_proof(folder: Path) -> Payload:
    """A command that leaves a file behind if it is ever run."""
    return Payload(os.system, f"touch {folder.parent / 'pwned'}")


def approve(folder: Path) -> None:
    """Make the manifest fit what is in the folder now, as an attacker would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"size": path.stat().st_size, "crc32": checksum_file(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


# ---- attacks ----------------------------------------------------------------------------------------------------


def code_in(name: str) -> Attack:
    def attack(folder: Path) -> None:
        torch.save({"state": make_proof(folder)}, folder / name)
        change_manifest(folder, lambda manifest: manifest["files"].setdefault(name, {}))
        approve(folder)

    return attack


def code_as_a_plain_pickle(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes(pickle.dumps(make_proof(folder), protocol=2))
    approve(folder)


def code_through_an_allowed_name(folder: Path) -> None:
    """`getattr` and `eval` hidden behind names that a careless filter lets through."""
    torch.save({"x": Payload(getattr, "x", "upper"), "y": Payload(eval, "__import__('os')")}, folder / "scheduler.bin")
    approve(folder)


def code_in_an_object_array(folder: Path) -> None:
    import numpy as np

    torch.save({"numpy_random_seed": np.array([make_proof(folder)], dtype=object)}, folder / "random_states_0.pkl")
    approve(folder)


def compressed_bomb(folder: Path) -> None:
    """A few kilobytes that become a gigabyte."""
    with zipfile.ZipFile(folder / "optimizer.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w") as file:
            file.write(pickle.dumps({}, protocol=2))
        with archive.open("archive/data/0", "w") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
    approve(folder)


def overlapping_bomb(folder: Path) -> None:
    """Many entries of an archive that all show the same bytes."""
    path = folder / "optimizer.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("archive/data/0", bytes(1 << 20))
        same = archive.getinfo("archive/data/0")
        archive.filelist += [same] * 100
    approve(folder)


def safetensors_header_beyond_the_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    approve(folder)


def safetensors_shape_beyond_the_file(folder: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    approve(folder)


def safetensors_cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    approve(folder)


def rotten_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


def cut_file(folder: Path) -> None:
    path = folder / "optimizer.bin"
    path.write_bytes(path.read_bytes()[:-1])


def missing_file(folder: Path) -> None:
    (folder / "scheduler.bin").unlink()


def folder_for_a_file(folder: Path) -> None:
    (folder / "scheduler.bin").unlink()
    (folder / "scheduler.bin").mkdir()


def name_outside(name: str) -> Attack:
    def attack(folder: Path) -> None:
        (folder.parent / "secret").write_text("s")
        change_manifest(folder, lambda manifest: manifest["files"].update({name: {"size": 1, "crc32": "e8b7be43"}}))

    return attack


def link_outside(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "x").write_text("s")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")
    change_manifest(folder, lambda manifest: manifest["files"].update({"sub/x": {"size": 1, "crc32": "e8b7be43"}}))


def manifest_text(text: str) -> Attack:
    def attack(folder: Path) -> None:
        (folder / "manifest.json").write_text(text)

    return attack


def manifest_entry(record: Any) -> Attack:
    return lambda folder: change_manifest(
        folder, lambda manifest: manifest["files"].update({"model.safetensors": record})
    )


def manifest_with(**values: Any) -> Attack:
    return lambda folder: change_manifest(folder, lambda manifest: manifest.update(values))


def forged_journal(entry: dict[str, list[str]]) -> Attack:
    """An interrupted publication that would be finished outside of the folder."""

    def attack(folder: Path) -> None:
        (folder.parent / "secret").write_text("s")
        (folder / PUBLISHING).mkdir()
        (folder / PUBLISHING / "x").write_text("evil")
        (folder / PUBLISHING / JOURNAL).write_text(json.dumps({"move": [], "remove": [], **entry}))

    return attack


ATTACKS: dict[str, tuple[Attack, str]] = {
    **{f"code in {name}": (code_in(name), f"{name} holds more than plain data") for name in (
        "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "sampler.bin",
    )},
    "code as a plain pickle": (code_as_a_plain_pickle, r"optimizer\.bin"),
    "code through an allowed name": (code_through_an_allowed_name, r"scheduler\.bin holds more than plain data"),
    "code in an array of objects": (code_in_an_object_array, r"random_states_0\.pkl holds more than plain data"),
    "compressed bomb": (compressed_bomb, r"optimizer\.bin is larger when read than on the disk"),
    "overlapping bomb": (overlapping_bomb, r"optimizer\.bin is larger when read than on the disk"),
    "safetensors header beyond the file": (safetensors_header_beyond_the_file, r"model\.safetensors is damaged"),
    "safetensors shape beyond the file": (safetensors_shape_beyond_the_file, r"model\.safetensors is damaged"),
    "safetensors cut": (safetensors_cut, r"model\.safetensors is damaged"),
    "rotten bit": (rotten_bit, r"is damaged: 'model\.safetensors' has the checksum \w+, its manifest says \w+"),
    "cut file": (cut_file, r"not complete: 'optimizer\.bin' has \d+ bytes, its manifest says \d+"),
    "missing file": (missing_file, r"not complete: 'scheduler\.bin' is missing, its manifest says \d+ bytes"),
    "folder for a file": (folder_for_a_file, r"'scheduler\.bin' is missing"),
    "name outside": (name_outside("../secret"), r"'\.\./secret', which is not a plain path inside it"),
    "absolute name": (name_outside("/etc/hostname"), "not a plain path"),
    "name with detours": (name_outside("a/../../secret"), "not a plain path"),
    "link outside": (link_outside, r"'sub/x', which a symbolic link leads out of it"),
    "manifest of nothing": (manifest_text(""), r"manifest\.json is damaged"),
    "manifest of a list": (manifest_text("[1]"), r"manifest\.json is damaged"),
    "manifest without files": (manifest_text('{"format": 1}'), r"manifest\.json is damaged .*'files'"),
    "manifest that is cut": (manifest_text('{"format": 1, "fil'), r"manifest\.json is damaged"),
    "manifest with a size in words": (manifest_entry({"size": "big", "crc32": ""}), r"manifest\.json is damaged"),
    "manifest without a record": (manifest_entry(None), r"manifest\.json is damaged"),
    "manifest with a number in words": (manifest_with(step="1e9"), r"manifest\.json is damaged .*'step' is '1e9'"),
    "manifest of a newer version": (manifest_with(format=99), "has the format 99, and this version reads only format 1. Upgrade"),
    "manifest without bottom": (manifest_text("[" * 100_000), r"manifest\.json is damaged"),
    "journal that removes outside": (forged_journal({"remove": ["../secret"]}), "not a plain path"),
    "journal that moves outside": (forged_journal({"move": ["../x"]}), "not a plain path"),
}  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """A run with a good checkpoint behind it and other values in front."""
    kept = make_kept()
    kept._dataloaders = [object()]
    kept.fill(3.0)
    kept.save_state(tmp_path / "state")
    kept.fill(4.0)
    return kept


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_in_an_error(name: str, kept: Kept, tmp_path: Path) -> None:
    attack, reason = ATTACKS[name]
    attack(tmp_path / "state")
    with pytest.raises(ValueError, match=reason):
        kept.load_state(tmp_path / "state")
    assert kept.values() == {4.0}
    assert not (tmp_path / "pwned").exists()
    secret = tmp_path / "secret"
    assert not secret.exists() or secret.read_text() == "s"


@pytest.mark.parametrize("name", ["manifest of nothing", "name outside", "rotten bit", "missing file"])
def test_a_spoiled_checkpoint_can_be_saved_over(name: str, kept: Kept, tmp_path: Path) -> None:
    ATTACKS[name][0](tmp_path / "state")
    kept.save_state(tmp_path / "state")
    kept.fill(5.0)
    kept.load_state(tmp_path / "state")
    assert kept.values() == {4.0}
    secret = tmp_path / "secret"
    assert not secret.exists() or secret.read_text() == "s"


def test_a_link_in_the_place_of_a_file_is_not_written_through(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "state" / "model.safetensors").unlink()
    (tmp_path / "state" / "model.safetensors").symlink_to(tmp_path / "secret")
    (tmp_path / "state" / "notes.txt").touch()  # so that files are moved one by one
    kept.save_state(tmp_path / "state")
    assert (tmp_path / "secret").read_text() == "s"
    assert not (tmp_path / "state" / "model.safetensors").is_symlink()


def test_the_attackers_tools_work(tmp_path: Path) -> None:
    """A payload that could not do harm would prove nothing."""
    (tmp_path / "state").mkdir()
    pickle.loads(pickle.dumps(make_proof(tmp_path / "state")))
    assert (tmp_path / "pwned").exists()
