"""Mapped safetensors files: bit for bit what was written, or an error that says what is wrong with which tensor."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from accel_ops.files.mapped import MappedShard, mapped_shard
from accel_ops.files.safetensors_header import DTYPES, read_header
from accel_ops.files.tensor_files import DTYPE_NAMES


def is_written(dtype: torch.dtype) -> bool:
    """Whether the installed version of safetensors writes tensors of a dtype."""
    try:
        save({"tensor": torch.empty(0, dtype=dtype)})
    except KeyError:
        return False
    return True


WRITTEN = sorted(filter(is_written, DTYPE_NAMES), key=str)


@st.composite
def state_dicts(draw: Any) -> dict[str, torch.Tensor]:
    """Tensors of random bits, of all dtypes that safetensors writes, some without elements or dimensions."""
    state = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True)):
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(WRITTEN))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        largest = 1 if dtype is torch.bool else 255
        content = torch.tensor(
            draw(st.lists(st.integers(0, largest), min_size=count, max_size=count)), dtype=torch.uint8
        )
        state[name] = content.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return state


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@given(state_dicts())
def test_tensors_come_back_bit_for_bit(state: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file(state, path)
        shard = MappedShard(path)
        assert sorted(shard.names()) == sorted(state)
        for name, tensor in state.items():
            assert bits(shard.tensor(name)) == bits(tensor)
            assert shard.dtype_and_shape(name) == (tensor.dtype, tuple(tensor.shape))


def write_raw(path: Path, header: Any, data: bytes = b"", padding: int = 0) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode() + b" " * padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: Any = 0, end: Any = 8, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("F8_E8M0", 8), ("F6_E3M2", 6), ("F6_E2M3", 6), ("F4", 4), ("U16", 16), ("C64", 64)]
)
def test_a_dtype_that_torch_may_lack_has_its_size(tmp_path: Path, dtype: str, num_bytes: int) -> None:
    header = read_header(write_raw(tmp_path / "m", {"a": entry(0, num_bytes, dtype, [8])}, bytes(num_bytes)))
    assert header.tensors["a"].num_bytes == num_bytes
    with pytest.raises(ValueError, match="'a'"):
        read_header(write_raw(tmp_path / "m", {"a": entry(0, num_bytes + 1, dtype, [8])}, bytes(num_bytes + 1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_tensors_that_are_not_aligned_are_copied(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randn(3).to(dtype)
    data = bytes(value.view(torch.uint8).tolist())
    header = {"a": entry(0, len(data), DTYPE_NAMES[dtype], [3])}
    for padding in range(8):
        shard = MappedShard(write_raw(tmp_path / f"{padding}.safetensors", header, data, padding))
        assert torch.equal(shard.tensor("a"), value)
        assert shard.tensor("a").data_ptr() % dtype.itemsize == 0


def test_tensors_are_views_with_memory_of_their_own_extent(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.zeros(6)}, tmp_path / "m.safetensors")
    shard = MappedShard(tmp_path / "m.safetensors")
    first, again = shard.tensor("a"), shard.tensor("a")
    assert first.data_ptr() == again.data_ptr()
    assert first.untyped_storage().nbytes() == 16
    assert first.untyped_storage().data_ptr() == first.data_ptr()
    assert not first.requires_grad
    assert "a" in shard
    assert "c" not in shard
    with pytest.raises(KeyError, match=r"no tensor 'c'"):
        shard.tensor("c")


def test_writing_to_a_tensor_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(40_000)}, path)
    before = path.read_bytes()
    tensor = MappedShard(path).tensor("a")
    tensor.zero_()
    assert path.read_bytes() == before
    assert MappedShard(path).tensor("a").sum() == 40_000  # another map does not see it either
    assert tensor.sum() == 0


def test_memory_is_given_back_without_touching_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    state = {
        "a": torch.ones(5_000),
        "b": torch.full((5_000,), 2.0),
        "c": torch.full((5_000,), 3.0),
        "d": torch.ones(1),
    }
    save_file(state, path)
    shard = MappedShard(path)
    shard.tensor("a").fill_(7)
    shard.tensor("c").fill_(8)
    for name in ("b", "d"):
        shard.read_ahead(name)
        shard.forget(name)
        assert torch.equal(shard.tensor(name), state[name])
    assert (shard.tensor("a") == 7).all()
    assert (shard.tensor("c") == 8).all()


def test_a_file_is_mapped_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(4)}, path)
    shard = mapped_shard(path)
    (tmp_path / "link.safetensors").symlink_to(path)
    assert mapped_shard(str(path)) is shard
    assert mapped_shard(tmp_path / "link.safetensors") is shard
    save_file({"a": torch.zeros(5)}, tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").replace(path)
    tensor = shard.tensor("a")
    assert mapped_shard(path).tensor("a").shape == (5,)
    del shard
    assert tensor.sum() == 4  # the tensor keeps the old file's map open
    with pytest.raises(FileNotFoundError):
        mapped_shard(tmp_path / "none.safetensors")


DATA = bytes(8)
DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "no table": ("[1]", DATA, "not a table"),
    "no json": ("{{", DATA, "cannot be read"),
    "twice": ('{"a": {}, "a": {}}', DATA, "'a' occurs twice"),
    "deep": ("[" * 100_000, DATA, "cannot be read"),
    "no entry": ({"a": 3}, DATA, "'a' it does not say"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, DATA, "'a' it does not say"),
    "three offsets": ({"a": {**entry(), "data_offsets": [0, 4, 8]}}, DATA, "'a' it does not say"),
    "dtype": ({"a": entry(dtype="F31")}, DATA, "'a' has the dtype 'F31'"),
    "dtype of another kind": ({"a": entry(dtype=[])}, DATA, "'a' has the dtype"),
    "shape": ({"a": entry(shape=[-2])}, DATA, "'a' has the shape"),
    "shape of truth": ({"a": entry(shape=[True, 2])}, DATA, "'a' has the shape"),
    "shape of fractions": ({"a": entry(shape=[2.0])}, DATA, "'a' has the shape"),
    "negative": ({"a": entry(-8, 0)}, DATA, "'a' has the shape"),
    "backwards": ({"a": entry(8, 0)}, DATA, "'a' of shape"),
    "size": ({"a": entry(shape=[3])}, DATA, r"'a' of shape \(3,\) and dtype F32 takes 12 bytes, but 8"),
    "cut off": ({"a": entry()}, DATA[:5], "truncated: the tensor 'a' ends 3 bytes"),
    "outside": ({"a": entry(1 << 40, (1 << 40) + 8)}, DATA, "truncated: the tensor 'a'"),
    "overlapping": ({"a": entry(), "b": entry(4, 12)}, bytes(12), "'b' overlaps"),
    "gap": ({"a": entry(4, 12)}, bytes(12), "4 bytes of nothing before the tensor 'a'"),
    "rest": ({"a": entry()}, bytes(12), "4 bytes at its end"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, kind: str) -> None:
    header, data, problem = DAMAGED[kind]
    with pytest.raises(ValueError, match=problem) as caught:
        MappedShard(write_raw(tmp_path / "m.safetensors", header, data))
    assert str(tmp_path / "m.safetensors") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 20, b"PK\x03\x04" + bytes(30), bytes(100)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        MappedShard(path)


@given(st.data())
def test_a_file_cut_off_anywhere_is_refused(data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.safetensors")
        save_file({"a": torch.ones(4), "b": torch.ones(2, 2, dtype=torch.int8)}, path)
        content = path.read_bytes()
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(ValueError, match="damaged or not a safetensors file"):
            MappedShard(path)


def test_all_dtypes_of_the_writer_can_be_read() -> None:
    assert set(DTYPE_NAMES) <= set(DTYPES.values())
