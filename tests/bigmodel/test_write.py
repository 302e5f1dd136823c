"""Model folders: sharded as asked, complete or untouched, readable by anybody."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel import parse_size, split_into_shards, write_model_folder
from accel_ops.files import durable
from accel_ops.files.serialization import load
from accel_ops.files.tensor_files import read_tensors


def make_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).state_dict()  # 128, 32, 64 and 8 bytes


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    actual = {}
    for name, file_name in index["weight_map"].items():
        actual[name] = read_tensors(folder / file_name)[name]
    return actual


def test_shards_and_their_index(tmp_path: Path) -> None:
    state = make_state()
    names = write_model_folder(state, tmp_path, max_shard_size=100)
    assert names == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert [sorted(read_tensors(tmp_path / name)) for name in names[:3]] == [
        ["0.weight"],
        ["0.bias", "1.weight"],
        ["1.bias"],
    ]
    index = json.loads((tmp_path / names[3]).read_text())
    assert index["metadata"] == {"total_size": 232}
    loaded = read_folder(tmp_path)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert write_model_folder(state, tmp_path / "m") == ["model.safetensors"], "a small model is one file"
    loaded = read_tensors(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_shards_of_torch_files_keep_tied_names_together(tmp_path: Path) -> None:
    state = make_state()
    state["tied"] = state["0.weight"]
    names = write_model_folder(state, tmp_path, max_shard_size=100, safe_serialization=False)
    assert names[0] == "pytorch_model-00001-of-00003.bin"
    assert names[-1] == "pytorch_model.bin.index.json"
    shard = load(tmp_path / names[0])
    assert sorted(shard) == ["0.weight", "tied"]
    assert shard["tied"].data_ptr() == shard["0.weight"].data_ptr()
    assert json.loads((tmp_path / names[-1]).read_text())["metadata"] == {"total_size": 232}


def test_tied_and_strided_weights_are_saved_once_and_whole(tmp_path: Path) -> None:
    model = nn.Module()
    model.first, model.last = nn.Linear(4, 4), nn.Linear(4, 4)
    model.last.weight = model.first.weight
    model.register_buffer("strided", torch.randn(6, 4).t())
    write_model_folder(model.state_dict(), tmp_path)
    loaded = read_tensors(tmp_path / "model.safetensors")
    assert sorted(loaded) == ["first.bias", "first.weight", "last.bias", "strided"]
    assert torch.equal(loaded["strided"], model.strided)


def test_an_earlier_save_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for theirs in ("model_1.safetensors", "pytorch_model.bin"):
        (tmp_path / theirs).write_text("theirs")
    write_model_folder(make_state(), tmp_path, max_shard_size=30)
    write_model_folder(make_state(), tmp_path, max_shard_size=100)
    assert sorted(os.listdir(tmp_path)) == [
        "config.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
        "model_1.safetensors",
        "pytorch_model.bin",
    ]
    write_model_folder(make_state(), tmp_path)
    kept = ["config.json", "model.safetensors", "model_1.safetensors", "pytorch_model.bin"]
    assert sorted(os.listdir(tmp_path)) == kept


def test_a_full_disk_leaves_the_earlier_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    write_model_folder(state, tmp_path / "m", max_shard_size=100)
    real_write, room = os.write, [400]

    def nearly_full(descriptor: int, data: Any) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data)

    monkeypatch.setattr(durable.os, "write", nearly_full)
    changed = {name: tensor + 1 for name, tensor in state.items()}
    with pytest.raises(OSError, match="No space left"):
        write_model_folder(changed, tmp_path / "m", max_shard_size=100)
    assert os.listdir(tmp_path) == ["m"]
    loaded = read_folder(tmp_path / "m")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("size", "num_bytes"), [(7, 7), ("1KB", 1000), ("2 mb", 2_000_000), ("1.5GB", 1_500_000_000), ("1TB", 10**12)]
)
def test_sizes(size: int | str, num_bytes: int) -> None:
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize("size", ["100", "100B", "1KiB", "GB", "-1GB", "", 0, -5, "0KB"])
def test_wrong_sizes_are_refused_before_anything_is_written(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=repr(size)):
        write_model_folder(make_state(), tmp_path / "m", max_shard_size=size)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("size", [None, 1.5, True])
def test_sizes_of_other_types_are_refused(size: Any) -> None:
    with pytest.raises(TypeError, match="like '10GB'"):
        parse_size(size)


def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'extra' is a int"):
        write_model_folder({"extra": 3}, tmp_path / "m")  # type: ignore[dict-item]
    assert not (tmp_path / "m").exists()


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 60))
def test_every_tensor_is_in_one_shard_within_the_limit(lengths: list[int], limit: int) -> None:
    state = {str(i): torch.zeros(length, dtype=torch.uint8) for i, length in enumerate(lengths)}
    shards = split_into_shards(state, limit)
    assert sorted(name for shard in shards for name in shard) == sorted(state)
    for shard in shards:
        total = sum(state[name].numel() for name in shard)
        assert total <= limit or len(shard) == 1
    assert all(shards) or shards == [[]]
