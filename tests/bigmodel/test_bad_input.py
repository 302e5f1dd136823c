"""Device maps, memory limits and offload indexes that make no sense: one sentence that names the entry."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel.budgets import get_balanced_memory, get_max_memory
from accel_bigmodel.device_map.plan import infer_auto_device_map
from accel_bigmodel.dispatch import disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accel_bigmodel.offload.folder import offload_state_dict
from accel_bigmodel.offload.loader import OffloadedWeightsLoader
from accel_bigmodel.tensors import set_module_tensor_to_device


def model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


NO_MAPPINGS: list[Any] = [0, 1.5, ["cpu"], torch.device("cpu"), [("", "cpu")]]
NO_DEVICES: list[Any] = [[], {}, None, -1, "gpu", "dsk", 1.0, True, "cpu ", b"cpu"]


@pytest.mark.parametrize("device_map", NO_MAPPINGS, ids=repr)
def test_a_device_map_that_is_no_mapping(tmp_path: Path, device_map: Any) -> None:
    torch.save(model_of_two().state_dict(), tmp_path / "pytorch_model.bin")
    for place in (dispatch_model, lambda model, places: load_checkpoint_and_dispatch(model, tmp_path, places)):
        with pytest.raises(TypeError, match=r"device_map=.* is not a mapping .*\{'': device\}"):
            place(model_of_two(), device_map)


@pytest.mark.parametrize("place", NO_DEVICES, ids=repr)
def test_a_device_map_with_what_is_no_device(tmp_path: Path, place: Any) -> None:
    torch.save(model_of_two().state_dict(), tmp_path / "pytorch_model.bin")
    device_map = {"0": "cpu", "1": "cpu", "2": place}
    with pytest.raises(ValueError, match="'2'.*is not a device"):
        dispatch_model(model_of_two(), device_map)
    with pytest.raises(ValueError, match="'2'.*is not a device"):
        load_checkpoint_and_dispatch(model_of_two(), tmp_path, device_map)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("place", [0, "cuda", "cuda:0", torch.device("cuda", 1)], ids=repr)
def test_a_device_map_for_another_machine(place: Any) -> None:
    model = model_of_two()
    with pytest.raises(ValueError, match=r"names 'cuda.* for '0'.*this machine has no accelerator"):
        dispatch_model(model, {"0": place, "1": "cpu", "2": "cpu"})
    assert model[0].weight.device.type == "cpu"
    assert not hasattr(model, "hf_device_map")


def test_sizes_are_replaced_by_bytes_in_the_limits_given() -> None:
    for use in (get_max_memory, lambda limits: infer_auto_device_map(model_of_two(), limits)):
        limits: dict[Any, Any] = {"cpu": "10GB", "disk": 5}
        use(limits)
        assert limits == {"cpu": 10**10, "disk": 5}
    frozen = MappingProxyType({"cpu": "1KB"})
    assert get_max_memory(frozen) == {"cpu": 1000}


def test_infinite_memory_is_no_limit() -> None:
    limits = {"cpu": math.inf}
    assert get_max_memory(limits) == limits
    assert get_balanced_memory(model_of_two(), limits) == limits
    assert infer_auto_device_map(model_of_two(), limits) == {"": "cpu"}


@pytest.mark.parametrize("size", [math.nan, -math.inf, None, [], "abc", "-5GB", -5], ids=repr)
def test_a_limit_that_is_no_size(size: Any) -> None:
    with pytest.raises(ValueError, match=r"max_memory gives 'cpu' .*(number of bytes|use 0)"):
        get_max_memory({"cpu": size})


@pytest.mark.parametrize("limits", [5, "10GB", ["cpu"]], ids=repr)
def test_limits_that_are_no_mapping(limits: Any) -> None:
    with pytest.raises(TypeError, match="max_memory=.* is not a mapping"):
        get_max_memory(limits)


@pytest.mark.parametrize("device", [-1, "0", "cuda:0", "gpu", 1.0, None], ids=repr)
def test_limits_of_what_is_no_device(device: Any) -> None:
    with pytest.raises(ValueError, match="max_memory has the unknown device"):
        get_max_memory({device: "1GB"})


ENTRIES: list[Any] = [
    [1],
    None,
    3,
    {},
    {"dtype": "float32"},
    {"shape": [4, 4]},
    *({"dtype": "float32", "shape": shape} for shape in ("4", [-4, 4], [4.0, 4], None, [[4], 4], [True, 4], 16)),
    *({"dtype": dtype, "shape": [4, 4]} for dtype in (3, "float99", "nn", None, "")),
    {"safetensors_file": 3},
]


@pytest.mark.parametrize("entry", ENTRIES, ids=repr)
def test_an_offload_index_with_a_damaged_entry(tmp_path: Path, entry: Any) -> None:
    offload_state_dict(tmp_path, model_of_two().state_dict())
    index = json.loads((tmp_path / "index.json").read_text())
    damaged = {**index, "0.weight": entry}
    (tmp_path / "index.json").write_text(json.dumps(damaged))
    says = "'0.weight'.*damaged"
    with pytest.raises(ValueError, match=says):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ValueError, match=says):
        disk_offload(model_of_two(), tmp_path)
    with pytest.raises(ValueError, match=says):
        dispatch_model(model_of_two(), {"0": "disk", "1": "cpu", "2": "cpu"}, offload_dir=tmp_path)
    weights = OffloadedWeightsLoader(save_folder=tmp_path, index=damaged)
    with pytest.raises(KeyError if entry is None else ValueError, match="0.weight"):
        weights["0.weight"]
    assert weights["0.bias"].shape == (4,)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"null"], ids=len)
def test_an_offload_index_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match="is not an index of offloaded weights"):
        disk_offload(model_of_two(), tmp_path)


def test_an_offload_folder_of_another_model(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, nn.Sequential(nn.Linear(4, 4)).state_dict())
    with pytest.raises(ValueError, match=r"lack '2.weight' and 1 more parameters of Sequential"):
        disk_offload(model_of_two(), tmp_path)
    with pytest.raises(ValueError, match="lack '2.weight'"):
        dispatch_model(model_of_two(), {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=tmp_path)
    inputs = torch.ones(1, 4)
    model = model_of_two()
    expected = model(inputs)
    offload_state_dict(tmp_path, model.state_dict())
    assert torch.equal(
        dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=tmp_path)(inputs), expected
    )


@pytest.mark.parametrize("dtype", ["bfloat17", "torch.load", 3])
def test_dtypes_that_do_not_exist_are_named(dtype: Any) -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    with pytest.raises(ValueError, match=f"dtype={dtype!r} is not a torch dtype"):
        set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2), dtype=dtype)
    assert layer.weight is before
