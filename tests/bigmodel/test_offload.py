"""Weights that wait in memory, in checkpoint files or in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel.dispatch import cpu_offload
from accel_bigmodel.hooks.hook import ModelHook, add_hook_to_module
from accel_bigmodel.offload.collect import get_state_dict_offloaded_model
from accel_bigmodel.offload.folder import (
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    read_index,
    save_offload_index,
)
from accel_bigmodel.offload.loader import OffloadedWeightsLoader, PrefixedDataset, extract_submodules_state_dict
from accel_bigmodel.tensors import align_module_device

WEIGHTS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.scalar": torch.tensor(3.5),
    "b.half": torch.ones(2, dtype=torch.bfloat16),
    "b.eighth": torch.ones(2).to(torch.float8_e4m3fn),
    "b.flags": torch.tensor([True, False]),
    "c.empty": torch.zeros(0, 3),
}


def test_a_folder_of_weights(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "new", WEIGHTS)
    index = json.loads((tmp_path / "new" / "index.json").read_text())
    assert index["b.half"] == {"dtype": "bfloat16", "shape": [2]}
    assert (tmp_path / "new" / "a.weight.dat").stat().st_size == 24
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(loader) == list(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert loader[name].dtype == weight.dtype
        assert torch.equal(loader[name].float(), weight.float())
    assert loader["a.scalar"].item() == 3.5
    assert loader["a.weight"] is loader["a.weight"], "it is mapped once"


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_weights_come_back_bit_for_bit(values: list[float]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        index = offload_weight(torch.tensor(values), "w", folder, {})
        assert index is not None
        assert load_offloaded_weight(f"{folder}/w.dat", index["w"]).tolist() == values


def test_a_folder_is_a_cache_that_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    offload_state_dict(tmp_path, {"w": torch.ones(3), "large": torch.zeros(1 << 19)})
    assert not synced
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path)["w"], torch.ones(3))


def test_a_mapped_weight_and_its_file_do_not_change_one_another(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(3)})
    OffloadedWeightsLoader(save_folder=tmp_path)["w"].zero_()
    mapped = OffloadedWeightsLoader(save_folder=tmp_path)["w"]
    offload_state_dict(tmp_path, {"w": torch.zeros(3)})
    assert mapped.tolist() == [1, 1, 1]
    assert OffloadedWeightsLoader(save_folder=tmp_path)["w"].tolist() == [0, 0, 0]


def test_an_index_grows(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    assert not list(tmp_path.iterdir())
    for name in ("a", "b"):
        index = offload_weight(torch.ones(1), name, tmp_path, {})
        assert index is not None
        save_offload_index(index, tmp_path)
    assert list(read_index(tmp_path)) == ["a", "b"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"index.json is missing"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    offload_state_dict(tmp_path, {"w": torch.ones(3)})
    (tmp_path / "w.dat").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"w.dat' has 4 bytes, but \(3,\) of torch.float32 take 12"):
        OffloadedWeightsLoader(save_folder=tmp_path)["w"]
    with pytest.raises(ValueError, match="float31"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float31", "shape": [1]})
    for content, words in (("{", "not an index"), ("[]", "it holds a list")):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(ValueError, match=words):
            read_index(tmp_path)
    with pytest.raises(ValueError, match="got no weights"):
        OffloadedWeightsLoader()
    with pytest.raises(ValueError, match="no save_folder"):
        OffloadedWeightsLoader(index={"w": {"dtype": "float32", "shape": [1]}})["w"]
    with pytest.raises(ValueError, match="not a plain path inside"):
        offload_weight(torch.ones(1), "../w", tmp_path)


def test_an_index_names_files_of_its_folder_or_a_checkpoint_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("folder", "elsewhere"):
        (tmp_path / place).mkdir()
        save_file({"w": torch.full((2,), float(len(place)))}, tmp_path / place / "model.safetensors")
    monkeypatch.chdir(tmp_path / "elsewhere")

    def weight_of(file: str) -> list[float]:
        index = {"w": {"safetensors_file": file, "dtype": "float32", "shape": [2]}}
        (tmp_path / "folder" / "index.json").write_text(json.dumps(index))
        return OffloadedWeightsLoader(save_folder=tmp_path / "folder")["w"].tolist()

    assert weight_of("model.safetensors") == [6.0, 6.0], "beside the index, not in the working folder"
    assert weight_of(str(tmp_path / "elsewhere" / "model.safetensors")) == [9.0, 9.0]
    with pytest.raises(ValueError, match="not a plain path inside"):
        weight_of("../elsewhere/model.safetensors")


def test_weights_from_several_places_and_of_some_modules(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"b.x": torch.ones(1)})
    loader = OffloadedWeightsLoader(state_dict={"a.x": torch.zeros(1)}, save_folder=tmp_path)
    assert (len(loader), list(loader)) == (2, ["a.x", "b.x"])
    part = PrefixedDataset(loader, "b.")
    assert (part["x"].item(), list(part), len(part)) == (1, ["b.x"], 2)
    weights = {"a.b": 1, "a.c": 2, "ab.c": 3, "a": 4}
    assert extract_submodules_state_dict(weights, ["a"]) == {"a.b": 1, "a.c": 2, "a": 4}  # type: ignore[arg-type]
    assert extract_submodules_state_dict(weights, [""]) == weights  # type: ignore[arg-type]


@pytest.mark.parametrize("appended", [0, 1, 2])
def test_weights_are_found_behind_appended_hooks(appended: int) -> None:
    layer = nn.Linear(4, 4)
    expected = layer.weight.detach().clone()
    for _ in range(appended):
        add_hook_to_module(layer, ModelHook(), append=True)
    cpu_offload(layer, "cpu")
    for _ in range(appended):
        add_hook_to_module(layer, ModelHook(), append=True)
    assert layer.weight.is_meta
    assert torch.equal(get_state_dict_offloaded_model(layer)["weight"], expected)
    with align_module_device(layer):
        assert torch.equal(layer.weight, expected)
    assert layer.weight.is_meta
