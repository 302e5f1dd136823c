"""Models spread over CPU memory and the disk."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel.device_map import check
from accel_bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accel_bigmodel.empty import init_empty_weights
from accel_bigmodel.hooks.attach import materialize_meta_tensors
from accel_bigmodel.offload.collect import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    load_offloaded_weights,
)
from accel_bigmodel.offload.folder import offload_state_dict, read_index
from accel_bigmodel.weights.write import write_model_folder
from tests.bigmodel.test_hooks import new_model

INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_everything_waits_in_memory_or_on_disk(offload_buffers: bool, tmp_path: Path) -> None:
    for offload in (
        lambda model: cpu_offload(model, offload_buffers=offload_buffers),
        lambda model: disk_offload(model, tmp_path, "cpu", offload_buffers=offload_buffers),
        lambda model: disk_offload(model, tmp_path, offload_buffers=offload_buffers),  # it is there already
    ):
        model = new_model()
        expected = model(INPUTS)
        assert offload(model) is model
        assert all(parameter.is_meta for parameter in model.parameters())
        for _ in range(2):
            assert torch.equal(model(INPUTS), expected)


@pytest.mark.parametrize(
    "device_map",
    [
        {"0": "cpu", "1": "cpu", "2": "disk"},
        {"0": "disk", "1": "disk", "2.0": "cpu"},
        {"0": "disk", "": "cpu"},
        {"": "disk"},
    ],
)
def test_parts_are_on_disk(device_map: dict[str, Any], tmp_path: Path) -> None:
    model = new_model()
    expected = model(INPUTS)
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert model.hf_device_map == device_map
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == any(name.startswith(f"{part}." if part else "") for part in on_disk)
    assert torch.equal(model(INPUTS), expected)
    assert materialize_meta_tensors(model) is model
    assert not hasattr(model, "hf_device_map")
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model.to(torch.float64).to(torch.float32)(INPUTS), expected)


def test_weights_that_were_never_loaded_cannot_be_materialized() -> None:
    with init_empty_weights():
        model = new_model()
    with pytest.raises(ValueError, match=r"meta device, and no hook offloads them: 0\.weight.*Load a checkpoint"):
        materialize_meta_tensors(model)


@given(st.lists(st.sampled_from(["cpu", "disk"]), min_size=3, max_size=3), st.booleans())
def test_results_are_the_same_wherever_parts_are(places: list[str], offload_buffers: bool) -> None:
    model = new_model()
    expected = model(INPUTS)
    with TemporaryDirectory() as folder:
        device_map = dict(zip(["0", "1", "2"], places, strict=True))
        dispatch_model(model, device_map, offload_dir=folder, offload_buffers=offload_buffers)
        assert torch.equal(model(INPUTS), expected)


def test_a_model_on_one_device_needs_no_hooks() -> None:
    model = dispatch_model(new_model(), {"": "cpu"})
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())
    model = dispatch_model(new_model(), {"": "cpu"}, force_hooks=True)
    assert all(hasattr(part, "_hf_hook") for part in (model, model[0]))  # type: ignore[index]


def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    words = torch.tensor([1, 2])
    for ends, body in (("cpu", "disk"), ("disk", "cpu")):
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
        model[2].weight = model[0].weight
        expected = model(words)
        dispatch_model(model, {"0": ends, "1": body, "2": ends}, offload_dir=tmp_path / ends)
        assert model[2].weight is model[0].weight
        assert torch.equal(model(words), expected)


def test_weights_already_offloaded_are_used(tmp_path: Path) -> None:
    model = new_model()
    expected = model(INPUTS)
    offload_state_dict(tmp_path, model.state_dict())
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    dispatch_model(model, {"0": "disk", "1": "cpu", "2": "cpu"}, offload_dir=tmp_path)
    assert torch.equal(model(INPUTS), expected)
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_moving_a_model_that_is_spread_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = dispatch_model(new_model(), {"0": "disk", "1": "cpu", "2": "cpu"}, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match="cannot be moved"):
        model.to("cpu")
    model = dispatch_model(new_model(), {"": "cpu"}, force_hooks=True)
    assert model.to("cpu") is not None
    assert "is dispatched over devices" in caplog.text
    assert {record.name for record in caplog.records} == {"accelerate.big_modeling"}


def test_maps_that_cannot_be_followed() -> None:
    model = new_model()
    with pytest.raises(ValueError, match="pass offload_dir"):
        dispatch_model(model, {"0": "disk", "1": "cpu", "2": "cpu"})
    with pytest.raises(ValueError, match="no device for '2.0.weight'"):
        dispatch_model(model, {"0": "cpu", "1": "cpu"})
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_weights_are_collected_from_everywhere(tmp_path: Path) -> None:
    model = new_model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dispatch_model(model, {"0": "disk", "1": "cpu", "2": "cpu"}, offload_dir=tmp_path)
    actual = get_state_dict_offloaded_model(model)
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    part = get_state_dict_from_offload(model[0], "0.weight", {"0.weight": None, "1.weight": 1})  # type: ignore[index]
    assert torch.equal(part["0.weight"], expected["0.weight"])
    assert part["1.weight"] == 1
    layer = nn.Linear(4, 4, device="meta")
    offload_state_dict(tmp_path / "layer", {"weight": expected["0.weight"], "bias": expected["0.bias"]})
    load_offloaded_weights(layer, None, tmp_path / "layer")
    load_offloaded_weights(layer, read_index(tmp_path / "layer"), tmp_path / "layer")
    assert torch.equal(layer.weight, expected["0.weight"])
    with pytest.raises(ValueError, match=r"on the meta device.*weight"):
        get_state_dict_offloaded_model(nn.Linear(2, 2, device="meta"))


def test_the_check_can_be_replaced_under_its_old_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.big_modeling

    monkeypatch.setattr(accelerate.big_modeling, "check_device_map", lambda *_: None)
    assert dispatch_model(new_model(), {"0": "cpu"}).hf_device_map == {"0": "cpu"}


@pytest.mark.parametrize(
    "device_map", ["auto", "balanced_low_0", "sequential", {"0": "disk", "1": "cpu", "2": "disk"}]
)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_checkpoint_is_loaded_and_spread_out(device_map: Any, dtype: torch.dtype | None, tmp_path: Path) -> None:
    plain = new_model()
    write_model_folder(plain.state_dict(), tmp_path / "model", max_shard_size="100KB")
    with init_empty_weights():
        model = new_model()
    limits = {"cpu": 200} if isinstance(device_map, str) else None
    model = load_checkpoint_and_dispatch(
        model, tmp_path / "model", device_map, limits, offload_folder=tmp_path / "offload", dtype=dtype
    )
    assert "disk" in model.hf_device_map.values()  # type: ignore[union-attr, operator]
    expected, inputs = (plain, INPUTS) if dtype is None else (plain.to(dtype), INPUTS.to(dtype))
    for _ in range(2):
        assert torch.equal(model(inputs), expected(inputs))
    written = list((tmp_path / "offload").glob("*.dat"))
    assert bool(written) == (dtype is not None), "what the checkpoint holds as it is is read there"


def test_without_a_map_weights_are_only_loaded(tmp_path: Path) -> None:
    plain = new_model()
    write_model_folder(plain.state_dict(), tmp_path)
    model = load_checkpoint_and_dispatch(new_model(), tmp_path)
    assert torch.equal(model(INPUTS), plain(INPUTS))
    assert not hasattr(model, "hf_device_map")
    with pytest.raises(ValueError, match="'evenly' is unknown.*balanced"):
        load_checkpoint_and_dispatch(new_model(), tmp_path, device_map="evenly")


def test_a_map_that_exceeds_memory_is_refused_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "free_bytes", lambda device: 50)
    write_model_folder(new_model().state_dict(), tmp_path / "model")
    with init_empty_weights():
        model = new_model()
    with pytest.raises(ValueError, match=r"does not fit into memory: .* GB are to go to cpu, where .* GB too many"):
        load_checkpoint_and_dispatch(model, tmp_path / "model", {"": "cpu"}, dtype=torch.float64)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_checkpoint_and_dispatch(model, tmp_path / "model", {"": "cpu"})  # a view of the file takes no memory

    model = new_model()
    for device_map in ({"0": "cpu", "1": "meta", "2": "disk"}, {"": "meta"}):
        with pytest.raises(ValueError, match="are to go to meta"):
            dispatch_model(model, device_map, offload_dir=tmp_path / "offload", main_device="cpu")
    assert not (tmp_path / "offload").exists()
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    size = sum(parameter.nbytes for parameter in model[2].parameters())
    assert check.bytes_to_move(model, {"": "cpu"}) == {}
    assert check.bytes_to_move(model, {"2": "meta", "1": "cpu"})[torch.device("meta")] >= size
