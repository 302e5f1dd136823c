"""Objects come back from files as data, and nothing in a file ever runs."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import io
import os
import pathlib
import random
import re
import types
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_ops.files.serialization import check_loadable, load, save
from accel_ops.files.tensor_files import read_tensors


class Thing:
    pass


def test_objects_come_back(tmp_path: Path) -> None:
    state = {"step": 3, "nested": [torch.arange(3), ("text", None, 1.5)], "shape": torch.Size([2])}
    save(state, tmp_path / "x.bin")
    loaded = load(tmp_path / "x.bin", map_location="cpu")
    assert torch.equal(loaded["nested"][0], torch.arange(3))
    assert loaded["nested"][1] == ("text", None, 1.5)
    assert os.listdir(tmp_path) == ["x.bin"]


def test_open_files_are_written_and_read_where_they_stand() -> None:
    buffer = io.BytesIO()
    save([1, 2], buffer)
    buffer.seek(0)
    assert load(buffer) == [1, 2]


def test_tensors_as_safetensors(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    save({"a": weight, "tied": weight}, tmp_path / "x.safetensors", safe_serialization=True)
    loaded = read_tensors(tmp_path / "x.safetensors")
    assert list(loaded) == ["a"]
    assert torch.equal(loaded["a"], weight)


@pytest.mark.parametrize("value", [3, [torch.ones(1)]])
def test_safetensors_hold_only_dicts(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="needs a dict of tensors"):
        save(value, tmp_path / "x", safe_serialization=True)
    assert not os.listdir(tmp_path)


STANDARD_VALUES = [
    collections.deque([1, collections.deque([2])], maxlen=5), collections.defaultdict(list, a=[1]), frozenset({1, 2}), slice(1, None),
    array.array("d", [1.5]), collections.ChainMap({"a": 1}), types.SimpleNamespace(a=1), decimal.Decimal("1.5"), uuid.UUID(int=7),
    datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(hours=1),
    Path("/data"), pathlib.PurePosixPath("data"), np.datetime64("2026-01-02"), [{"key": [collections.deque()]}],
]  # fmt: skip


@pytest.mark.parametrize("value", STANDARD_VALUES)
def test_standard_values_come_back_as_they_were(value: Any) -> None:
    check_loadable({"value": value}, "the state")
    buffer = io.BytesIO()
    save({"value": value}, buffer)
    buffer.seek(0)
    loaded = load(buffer)["value"]
    assert (type(loaded), loaded) == (type(value), value)
    assert getattr(loaded, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(loaded, "default_factory", None) is getattr(value, "default_factory", None)
    buffer.seek(0)
    # plain pickle reads the file, as accelerate 1.15 does
    assert torch.load(buffer, weights_only=False)["value"] == value  # noqa: TID251


def test_a_file_cannot_call_what_is_not_in_the_table(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, ("touch /tmp/never",)

    torch.save(collections.deque([Runs()]), tmp_path / "x.bin")
    with pytest.raises(ValueError, match="more than plain data"):
        load(tmp_path / "x.bin")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "int64", "float16", "float64", "complex128", "U3", "S2"])
def test_numpy_values_are_data(tmp_path: Path, dtype: str) -> None:
    array = np.zeros(2, dtype=dtype)
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "array": array, "scalar": array[0]}
    save(state, tmp_path / "x.pkl")
    loaded = load(tmp_path / "x.pkl")
    assert np.array_equal(loaded["array"], array)
    assert loaded["scalar"] == array[0]
    assert np.array_equal(loaded["numpy"][1], state["numpy"][1])
    assert loaded["python"] == state["python"]


@pytest.mark.parametrize("home", [b"numpy.core", b"numpy._core"])
def test_arrays_that_another_numpy_wrote_are_data(tmp_path: Path, home: bytes) -> None:
    array = np.arange(5)
    written = io.BytesIO()
    torch.save({"array": array}, written, _use_new_zipfile_serialization=False)
    old = re.sub(rb"numpy\._?core(?=\.multiarray)", home, written.getvalue())
    (tmp_path / "array.pt").write_bytes(old)
    assert home + b".multiarray" in old
    assert np.array_equal(load(tmp_path / "array.pt")["array"], array)


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    torch.save(np.array([Thing()], dtype=object), tmp_path / "x.pkl")
    with pytest.raises(ValueError, match="nothing of it was executed"):
        load(tmp_path / "x.pkl")


def test_a_class_is_refused_by_name_unless_it_is_trusted(tmp_path: Path) -> None:
    save(Thing(), tmp_path / "x.pkl")
    with pytest.raises(ValueError, match=r"names .*test_files\.Thing.*add_safe_globals"):
        load(tmp_path / "x.pkl")
    with torch.serialization.safe_globals([Thing]):
        assert isinstance(load(tmp_path / "x.pkl"), Thing)
    assert Thing not in torch.serialization.get_safe_globals()


def test_code_cannot_be_let_in(tmp_path: Path) -> None:
    save(1, tmp_path / "x.pkl")
    with pytest.raises(ValueError, match="weights_only=False would run code"):
        load(tmp_path / "x.pkl", weights_only=False)
    assert load(tmp_path / "x.pkl", weights_only=True) == 1


def test_unknown_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'pickle_module'"):
        load(tmp_path / "x.pkl", pickle_module=None)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02.", b"PK\x03\x04" + b"\0" * 40])
def test_what_torch_did_not_write_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.bin"):
        load(tmp_path / "x.bin")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    save(torch.zeros(1000), tmp_path / "x.bin")
    whole = (tmp_path / "x.bin").read_bytes()
    for end in (10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "x.bin").write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"x\.bin"):
            load(tmp_path / "x.bin")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.bin")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    save(torch.zeros(100_000), tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin") as source, zipfile.ZipFile(tmp_path / "y.bin", "w") as bomb:
        for entry in source.infolist():
            bomb.writestr(entry.filename, source.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="is larger when read than on the disk"):
        load(tmp_path / "y.bin")


def test_loadable_state_passes_the_check() -> None:
    state = {"a": [1, (2.0, {3})], 5: collections.OrderedDict(x=torch.ones(1)), "n": np.float64(1), "f": torch.float16}
    check_loadable(state, "the state")


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": [1, Thing()]}}, r"\['a'\]\['b'\]\[1\]"),
        ({Thing(): 1}, "key"),
        (Thing(), "at its top"),
        ({"a": collections.deque([Thing()])}, r"\['a'\]"),
        ({"a": collections.defaultdict(lambda: 1)}, r"\['a'\]"),
        ({"a": range(10**15)}, r"\['a'\]"),
        ({"a": lambda: None}, r"\['a'\]"),
    ],
)
def test_what_would_not_load_is_found_before_it_is_relied_on(state: Any, where: str) -> None:
    with pytest.raises(TypeError, match=f"^The state holds .*{where}"):
        check_loadable(state, "The state")


def test_a_trusted_class_passes_the_check() -> None:
    with torch.serialization.safe_globals([Thing]):
        check_loadable([Thing()], "the state")
