"""Loading checkpoints: every tensor where it belongs, files untouched, and nothing half done when something is wrong."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import find_tied_parameters, init_empty_weights, retie_parameters, write_model_folder
from accel_bigmodel.offload.folder import load_offloaded_weight
from accel_bigmodel.offload.loader import OffloadedWeightsLoader
from accel_bigmodel.weights import placing, progress
from accel_bigmodel.weights.compare import CheckpointMismatchError
from accel_bigmodel.weights.contents import CheckpointContents, FileBytes, MemoryBytes
from accel_bigmodel.weights.index import find_checkpoint
from accel_bigmodel.weights.load import load_checkpoint_in_model, load_state_dict
from accel_ops.files.mapped import mapped_shard
from tests.bigmodel.trees import mapped_file, models
from tests.support.ranks import ranks

WHOLE_ON_CPU = {"": "cpu"}


class Model(nn.Module):
    """Parameters, and buffers that are saved and that are not."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.lin = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.register_buffer("steps", torch.ones(2), persistent=False)
        if is_tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.bn(self.lin(self.emb(tokens))))


def empty(is_tied: bool = False) -> Model:
    with init_empty_weights():
        return Model(is_tied)


def weights(dtype: torch.dtype = torch.float32, *without: str) -> dict[str, torch.Tensor]:
    """A checkpoint's content."""
    torch.manual_seed(1)
    state = Model().state_dict()
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
        if name not in without
    }


def save(folder: Path, state: dict[str, torch.Tensor], **kwargs: Any) -> Path:
    write_model_folder(state, folder / "ckpt", **kwargs)
    return folder / "ckpt"


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def assert_holds(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    own = model.state_dict()
    for name, tensor in state.items():
        assert torch.equal(own[name], tensor.to(own[name].dtype)), name


def snapshot(model: nn.Module) -> dict[str, tuple[int, Any]]:
    """What is there, to see that nothing has changed."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (id(tensor), None if tensor.is_meta else tensor.tolist()) for name, tensor in tensors}


# ---- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("device_map", [None, WHOLE_ON_CPU, {"emb": "cpu", "lin": "cpu", "bn": "cpu", "head": "cpu"}])
@pytest.mark.parametrize("kwargs", [{}, {"max_shard_size": 60}, {"safe_serialization": False}], ids=str)
def test_all_formats(tmp_path: Path, is_empty: bool, device_map: Any, kwargs: Any) -> None:
    state = weights()
    model = empty() if is_empty else Model()
    index = load_checkpoint_in_model(model, save(tmp_path, state, **kwargs), device_map=device_map)
    assert index == {}
    assert_holds(model, state)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert all(parameter.requires_grad for parameter in model.parameters())


@settings(deadline=None)
@given(models(), st.booleans(), st.integers(1, 200))
def test_any_model_comes_back_bit_for_bit(model: nn.Module, is_safe: bool, shard_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        other = copy.deepcopy(model).to("meta")  # which unties
        retie_parameters(other, find_tied_parameters(model))
        expected = model.state_dict()
        with torch.no_grad():
            for tensor in expected.values():
                if tensor.is_floating_point():
                    tensor.normal_()
        write_model_folder(expected, folder, shard_bytes, is_safe)
        load_checkpoint_in_model(other, folder, device_map=WHOLE_ON_CPU, strict=True)
        loaded = other.state_dict()
        assert list(loaded) == list(expected)
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_files_by_their_own_path(tmp_path: Path) -> None:
    state = weights()
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    torch.save(OrderedDict(state), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "blob").write_bytes((tmp_path / "w.safetensors").read_bytes())
    for name in ("w.safetensors", "w.pt", "old.bin", "blob"):
        model = empty()
        load_checkpoint_in_model(model, str(tmp_path / name))
        assert_holds(model, state)


def test_a_state_dict_and_its_devices(tmp_path: Path) -> None:
    state = weights(torch.bfloat16)
    save_file(state, tmp_path / "w.safetensors", metadata={"format": "pt"})
    torch.save(state, tmp_path / "w.bin")
    for name in ("w.safetensors", "w.bin"):
        for device_map in (None, WHOLE_ON_CPU, {"emb": "disk", "lin": "meta"}):
            loaded = load_state_dict(tmp_path / name, device_map)
            where = {key: tensor.device.type for key, tensor in loaded.items()}
            on_meta = device_map is not None and "lin" in device_map
            assert where == {key: "meta" if on_meta and key.startswith("lin") else "cpu" for key in state}
            assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.items() if not tensor.is_meta)


# ---- no copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_safe", [True, False])
def test_parameters_are_views_of_the_files(tmp_path: Path, is_safe: bool) -> None:
    folder = save(tmp_path, weights(torch.float16), max_shard_size=60, safe_serialization=is_safe)
    model = empty().half()
    load_checkpoint_in_model(model, folder, device_map=WHOLE_ON_CPU)
    assert all(mapped_file(tensor).startswith(str(folder)) for tensor in model.state_dict().values())
    extents = [(parameter.untyped_storage().nbytes(), parameter.nbytes) for parameter in model.parameters()]
    assert all(extent == size for extent, size in extents) or not is_safe


@pytest.mark.parametrize("is_safe", [True, False])
def test_training_a_loaded_model_leaves_files_and_other_models_alone(tmp_path: Path, is_safe: bool) -> None:
    state = weights()
    folder = save(tmp_path, state, safe_serialization=is_safe)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    first, second = empty(), empty()
    reader = mapped_shard(folder / "model.safetensors") if is_safe else None  # as for offloaded weights
    load_checkpoint_in_model(first, folder)
    load_checkpoint_in_model(second, folder)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    for _ in range(2):
        first(torch.arange(6)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(first.lin.weight, state["lin.weight"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    assert_holds(second, state)
    assert reader is None or torch.equal(reader.tensor("lin.weight"), state["lin.weight"])
    third = empty()
    load_checkpoint_in_model(third, folder)
    assert_holds(third, state)


def test_a_loaded_model_can_be_copied_saved_and_outlives_its_files(tmp_path: Path) -> None:
    state = weights()
    folder = save(tmp_path, state)
    model = empty()
    load_checkpoint_in_model(model, folder)
    write_model_folder(model.state_dict(), folder)  # over the files that it is a view of
    again = copy.deepcopy(model)
    (folder / "model.safetensors").unlink()
    assert_holds(model, state)
    assert_holds(again, state)
    torch.save(model.lin.weight, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 4000


def test_one_tensor_of_a_file_that_is_two_of_the_model_is_copied(tmp_path: Path) -> None:
    state = weights()
    state["head.weight"] = state["emb.weight"]
    torch.save(state, tmp_path / "w.bin")
    model = empty()
    load_checkpoint_in_model(model, tmp_path / "w.bin")
    with torch.no_grad():
        model.head.weight.zero_()
    assert torch.equal(model.emb.weight, state["emb.weight"])


# ---- dtypes -----------------------------------------------------------------------------------------------------


def test_dtypes(tmp_path: Path) -> None:
    half = save(tmp_path, weights(torch.float16))
    floating = [name for name in weights() if name != "bn.num_batches_tracked"]

    def loaded(model: nn.Module, **kwargs: Any) -> set[torch.dtype]:
        before = dict(model.named_parameters())
        has_memory = not model.lin.weight.is_meta  # type: ignore[union-attr]
        load_checkpoint_in_model(model, half, **kwargs)
        assert_holds(model, weights(torch.float16))
        if has_memory and not kwargs:
            assert all(parameter is before[name] for name, parameter in model.named_parameters())
        actual = dtypes(model)
        assert actual["bn.num_batches_tracked"] is torch.int64
        return {actual[name] for name in floating}

    assert loaded(empty()) == {torch.float16}
    assert loaded(empty(), device_map=WHOLE_ON_CPU) == {torch.float32}
    assert loaded(Model()) == {torch.float32}
    assert loaded(Model(), device_map=WHOLE_ON_CPU) == {torch.float32}
    for dtype in (torch.float64, "float64", "torch.float64"):
        assert loaded(empty(), device_map=WHOLE_ON_CPU, dtype=dtype) == {torch.float64}
    assert loaded(Model(), dtype=torch.float64) == {torch.float64}
    for wrong in ("nonsense", "nn", 3):
        with pytest.raises(ValueError, match="is not a torch dtype"):
            load_checkpoint_in_model(Model(), half, dtype=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        (["wo"], {"wo.weight", "two.weight"}),
        (["block"], {"block.0.weight", "block.1.weight"}),
        (["block.0", "wo.weight"], {"block.0.weight", "wo.weight"}),
        (["weight"], set()),
    ],
)
def test_modules_that_stay_in_float32(tmp_path: Path, parts: list[str], kept: set[str]) -> None:
    def build() -> nn.Module:
        layers = {name: nn.Linear(2, 2, bias=False) for name in ("wo", "two")}
        return nn.ModuleDict({"block": nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2))), **layers})

    folder = save(tmp_path, build().half().state_dict())
    for dtype, expected in ((torch.float16, kept), (torch.bfloat16, set())):
        model = build()
        load_checkpoint_in_model(model, folder, device_map=WHOLE_ON_CPU, dtype=dtype, keep_in_fp32_modules=parts)
        assert {name for name, actual in dtypes(model).items() if actual is torch.float32} == expected


def test_integers_and_complex_numbers_stay_what_they_are(tmp_path: Path) -> None:
    state = {"whole": torch.arange(3), "packed": torch.arange(3, dtype=torch.int8), "complex": torch.ones(3) * 1j}
    model = nn.Module()
    model.whole = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    model.packed = nn.Parameter(torch.zeros(3))
    model.complex = nn.Parameter(torch.zeros(3) * 1j)
    model.complex.note = "kept"  # type: ignore[attr-defined]
    load_checkpoint_in_model(model, save(tmp_path, state), device_map=WHOLE_ON_CPU, dtype=torch.float16)
    assert dtypes(model) == {name: tensor.dtype for name, tensor in state.items()}
    assert not model.packed.requires_grad
    assert model.complex.requires_grad
    assert model.complex.note == "kept"  # type: ignore[attr-defined]


def test_several_threads_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "SMALL_BYTES", 0)
    monkeypatch.setattr(placing, "NUM_READERS", 3)
    state = {f"{i}.weight": torch.randn(30, 30).half() for i in range(20)}
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(20)))
    load_checkpoint_in_model(model, save(tmp_path, state), device_map=WHOLE_ON_CPU)
    assert_holds(model, state)


# ---- tied parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [["head.weight"], ["emb.weight"], []])
@pytest.mark.parametrize("device_map", [None, WHOLE_ON_CPU])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_tied_parameters_stay_tied(tmp_path: Path, absent: list[str], device_map: Any, dtype: Any) -> None:
    state = weights(torch.float32, *absent)
    folder = save(tmp_path, state)
    for model in (empty(is_tied=True), Model(is_tied=True)):
        load_checkpoint_in_model(model, folder, device_map=device_map, dtype=dtype, strict=True)
        assert model.head.weight is model.emb.weight
        assert_holds(model, {name: tensor for name, tensor in state.items() if name != "head.weight" or absent})


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_ties_take_the_loaded_value_whatever_their_names(tmp_path: Path, order: list[str]) -> None:
    model = nn.Module()
    for name in order:
        setattr(model, name, nn.Linear(3, 3, bias=False))
    model.b.weight = model.a.weight  # type: ignore[union-attr]
    state = {"b.weight": torch.full((3, 3), 5.0)}
    load_checkpoint_in_model(model, save(tmp_path, state), device_map=WHOLE_ON_CPU)
    assert model.a.weight is model.b.weight  # type: ignore[union-attr]
    assert torch.equal(model.a.weight, state["b.weight"])  # type: ignore[union-attr, arg-type]


def test_a_tied_parameter_of_which_one_name_is_on_disk(tmp_path: Path) -> None:
    state = weights(torch.float32, "head.weight")
    model = empty(is_tied=True)
    device_map = {"emb": "cpu", "lin": "cpu", "bn": "cpu", "head": "disk"}
    index = load_checkpoint_in_model(model, save(tmp_path, state), device_map=device_map)
    assert list(index) == ["head.weight"]
    assert torch.equal(OffloadedWeightsLoader(index=index)["head.weight"], state["emb.weight"])
    assert torch.equal(model.emb.weight, state["emb.weight"])


def test_a_configuration_that_promises_ties_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class PreTrainedModel(Model):
        def _tie_weights(self) -> None: ...

    load_checkpoint_in_model(PreTrainedModel(), save(tmp_path, weights()))
    assert "call model.tie_weights()" in caplog.text


# ---- disk -------------------------------------------------------------------------------------------------------

PART_ON_DISK = {"emb": "cpu", "lin": "disk", "bn": "disk", "head": "cpu"}


def test_what_is_on_disk_stays_in_the_checkpoint(tmp_path: Path) -> None:
    state = weights()
    folder = save(tmp_path, state, max_shard_size=60)
    model = empty()
    index = load_checkpoint_in_model(model, folder, device_map=PART_ON_DISK)
    assert sorted(index) == ["bn.bias", "bn.weight", "lin.bias", "lin.weight"]
    entry = index["lin.weight"]
    assert Path(entry.pop("safetensors_file")).parent == folder
    assert entry == {"weight_name": "lin.weight", "dtype": "float32", "shape": [4, 4]}
    assert model.lin.weight.is_meta
    assert not model.bn.running_mean.is_meta  # type: ignore[union-attr]
    assert_holds(model, {name: tensor for name, tensor in state.items() if name not in index})

    offloaded = tmp_path / "offloaded"
    index = load_checkpoint_in_model(
        empty(), folder, device_map=PART_ON_DISK, offload_folder=offloaded, offload_buffers=True
    )
    assert os.listdir(offloaded) == ["index.json"]
    assert json.loads((offloaded / "index.json").read_text()) == index
    loader = OffloadedWeightsLoader(save_folder=offloaded)
    on_disk = {name for name in state if name.startswith(("lin", "bn"))}
    assert set(loader) == on_disk
    assert all(torch.equal(loader[name], state[name]) for name in on_disk)


@pytest.mark.parametrize("kwargs", [{"dtype": torch.float16}, {"safe": False}], ids=str)
def test_what_cannot_stay_there_is_written(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    state = weights()
    folder = save(tmp_path, state, safe_serialization=kwargs.pop("safe", True))
    model = empty()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"offloads 'lin.weight' to disk, .* \(4 such weights\): pass offload_folder"):
        load_checkpoint_in_model(model, folder, device_map=PART_ON_DISK, **kwargs)
    assert snapshot(model) == before
    offloaded = tmp_path / "new" / "offloaded"
    index = load_checkpoint_in_model(model, folder, device_map=PART_ON_DISK, offload_folder=offloaded, **kwargs)
    dtype = kwargs.get("dtype", torch.float32)
    assert model.lin.weight.is_meta
    assert model.lin.weight.dtype is dtype
    for name, info in index.items():
        assert info["dtype"] == str(dtype).removeprefix("torch.")
        weight = load_offloaded_weight(offloaded / f"{name}.dat", info)
        assert torch.equal(weight, state[name].to(dtype))


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, weights())
    usage = type("Usage", (), {"free": 10})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    model = empty()
    before = snapshot(model)
    with pytest.raises(OSError, match=r"0\.00 GB are free: make room"):
        load_checkpoint_in_model(
            model, folder, device_map=PART_ON_DISK, offload_folder=tmp_path / "o", dtype=torch.float16
        )
    assert snapshot(model) == before
    assert not (tmp_path / "o").exists()


# ---- what does not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_map", [None, WHOLE_ON_CPU])
@pytest.mark.parametrize("is_safe", [True, False])
def test_all_that_differs_is_in_one_error(tmp_path: Path, device_map: Any, is_safe: bool) -> None:
    state = weights(torch.float32, "lin.bias")
    state |= {"lin.weight": torch.ones(3, 4), "extra": torch.ones(1)}
    folder = save(tmp_path, state, safe_serialization=is_safe)
    for model in (empty(), Model()):
        before = snapshot(model)
        for kind, strict in ((ValueError, True), (RuntimeError, False), (CheckpointMismatchError, True)):
            with pytest.raises(kind) as caught:
                load_checkpoint_in_model(model, folder, device_map=device_map, strict=strict)
            message = str(caught.value)
            assert "missing, and left unchanged in the model: lin.bias" in message
            assert "not in the model, and not used: extra" in message
            assert "with another shape: lin.weight (3, 4) instead of (4, 4)" in message
        assert snapshot(model) == before


@pytest.mark.parametrize("device_map", [None, WHOLE_ON_CPU])
def test_other_names_warn_once_unless_strict(
    tmp_path: Path, device_map: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = weights(torch.float32, "lin.bias") | {f"extra.{i}": torch.ones(1) for i in range(30)}
    folder = save(tmp_path, state)
    model = empty()
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(model, folder, device_map=device_map)
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "accelerate.utils.modeling"  # under which programs turn it off
    assert "30 not in the model, and were not used when loading" in caplog.text
    assert "and 10 more" in caplog.text
    assert model.lin.bias.is_meta
    assert torch.equal(model.lin.weight, state["lin.weight"])
    with pytest.raises(CheckpointMismatchError):
        load_checkpoint_in_model(Model(), folder, device_map=device_map, strict=True)


def test_old_checkpoints_that_do_not_count_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path, weights(torch.float32, "bn.num_batches_tracked"))
    load_checkpoint_in_model(Model(), folder, strict=True)
    load_checkpoint_in_model(empty(), folder, strict=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("device_map", "problem"),
    [
        ({"emb": "cpu"}, "has no device for 'lin.weight'"),
        ({"": "xpu:7"}, "names 'xpu:7', which is not available"),
        ("auto", "name of a strategy"),
    ],
)
def test_maps_that_do_not_fit(tmp_path: Path, device_map: Any, problem: str) -> None:
    model = empty()
    before = snapshot(model)
    with pytest.raises(ValueError, match=problem):
        load_checkpoint_in_model(model, save(tmp_path, weights()), device_map=device_map)
    assert snapshot(model) == before
    with pytest.warns(UserWarning, match=r": 'lim'.*Did you mean 'lin'"):
        load_checkpoint_in_model(model, tmp_path / "ckpt", device_map={"": "cpu", "lim": "cpu"})
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_damaged_shards_leave_the_model_alone(tmp_path: Path) -> None:
    folder = save(tmp_path, weights(), max_shard_size=60)
    last = sorted(folder.glob("*.safetensors"))[-1]
    content = last.read_bytes()
    for damaged in (content[:-3], b"nothing", b""):
        last.write_bytes(damaged)
        for model in (empty(), Model()):
            before = snapshot(model)
            with pytest.raises(ValueError, match="damaged or not a safetensors file"):
                load_checkpoint_in_model(model, folder)
            assert snapshot(model) == before


def test_shards_of_several_checkpoints_and_files_of_another_framework(tmp_path: Path) -> None:
    folder = save(tmp_path, weights(), max_shard_size=60)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"maps .* to .*, which does not hold it"):
        load_checkpoint_in_model(empty(), folder)
    save_file(weights(), tmp_path / "model.safetensors", metadata={"format": "tf"})
    with pytest.raises(ValueError, match="written for 'tf'"):
        load_checkpoint_in_model(empty(), tmp_path)


class Harmful:
    """Would leave a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm-was-done"),)


def test_files_with_code_or_other_things_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.bin"
    model = Model()
    before = snapshot(model)
    for content, problem in (
        ({"lin.weight": Harmful()}, "nothing of it was executed"),
        ([torch.ones(1)], "holds a list, not a dict of tensors"),
        ({"state_dict": {"lin.weight": torch.ones(1)}}, "holds a dict under 'state_dict'"),
        ({3: torch.ones(1)}, "holds a Tensor under 3"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=problem):
            load_checkpoint_in_model(model, path)
    path.write_bytes(b"not from torch")
    with pytest.raises(ValueError, match=str(path)):
        load_checkpoint_in_model(model, path)
    assert snapshot(model) == before
    assert not (tmp_path / "harm-was-done").exists()


# ---- modules with habits of their own ---------------------------------------------------------------------------


class Renaming(nn.Module):
    """Takes checkpoints that call its weight by an old name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}gamma")


def test_modules_that_rename_what_they_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path, {"gamma": torch.ones(3)})
    with init_empty_weights():
        no_memory = Renaming()
    for model in (Renaming(), no_memory):
        load_checkpoint_in_model(model, folder, strict=True)
        assert model.weight.sum() == 3
    folder = save(tmp_path, {"gamma": torch.ones(3), "extra": torch.ones(1)})
    load_checkpoint_in_model(Renaming(), folder)
    assert "not used when loading: extra" in caplog.text
    load_checkpoint_in_model(Renaming(), folder, dtype=torch.float16)
    assert "dtype=torch.float16 has no effect" in caplog.text


class Remembering(nn.Linear):
    """Saves something else besides tensors."""

    memory: Any = None

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


def test_extra_state(tmp_path: Path) -> None:
    model = Remembering(2, 2)
    model.memory = {"steps": 3}
    with pytest.raises(TypeError, match="'_extra_state' is a dict.*safe_serialization=False"):
        write_model_folder(model.state_dict(), tmp_path)
    write_model_folder(model.state_dict(), tmp_path / "folder", max_shard_size=8, safe_serialization=False)
    other = Remembering(2, 2)
    load_checkpoint_in_model(other, tmp_path / "folder", strict=True)
    assert (other.memory, other.weight.equal(model.weight)) == ({"steps": 3}, True)
    with pytest.raises(TypeError, match="_extra_state.*cannot be loaded"):
        write_model_folder({"_extra_state": object()}, tmp_path / "folder", safe_serialization=False)
    torch.save(model.state_dict(), tmp_path / "w.bin")
    for device_map in (None, WHOLE_ON_CPU):
        other = Remembering(2, 2)
        load_checkpoint_in_model(other, tmp_path / "w.bin", device_map=device_map, strict=True)
        assert other.memory == {"steps": 3}
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.bin")
    with pytest.raises(CheckpointMismatchError, match="missing.*_extra_state"):
        load_checkpoint_in_model(other, tmp_path / "w.bin", strict=True)


class Int8Params(nn.Parameter):
    """As bitsandbytes calls its 8-bit weights."""

    def __new__(cls, data: Any, requires_grad: bool = False, **kwargs: Any) -> Int8Params:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.__dict__.update(kwargs)
        return made


def test_scales_of_eight_bit_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].weight = Int8Params(torch.zeros(2, 2, dtype=torch.int8))  # type: ignore[assignment]
    state = {"0.weight": torch.ones(2, 2, dtype=torch.int8), "0.SCB": torch.full((2,), 5.0)}
    folder = save(tmp_path, state)
    load_checkpoint_in_model(model, folder, device_map=WHOLE_ON_CPU, dtype=torch.float16, strict=True)
    assert isinstance(model[0].weight, Int8Params)
    assert torch.equal(model[0].weight.SCB, state["0.SCB"])  # type: ignore[attr-defined]
    index = load_checkpoint_in_model(model, folder, device_map={"": "disk"}, offload_8bit_bnb=True)
    assert sorted(index) == ["0.SCB", "0.weight"]
    assert not caplog.records


# ---- libraries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_models_of_transformers(tmp_path: Path, family: str, is_tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "Llama": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "vocab_size": 64,
        },
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32},
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes[family], tie_word_embeddings=is_tied)
    kind = getattr(transformers, {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}[family])
    torch.manual_seed(0)
    model = kind(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with init_empty_weights():
        loaded = kind(config).eval()
    load_checkpoint_in_model(loaded, tmp_path, device_map=WHOLE_ON_CPU, strict=True)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == is_tied
    loaded.save_pretrained(tmp_path / "again")
    again = kind(config)
    load_checkpoint_in_model(again, tmp_path / "again", strict=True)
    assert_holds(again, model.state_dict())


# ---- progress and accelerators ----------------------------------------------------------------------------------


def test_a_bar_shows_only_after_a_while(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def work(**kwargs: Any) -> str:
        with progress.ByteProgress(100, "Loading weights", **kwargs) as bar:
            for _ in range(10):
                bar.advance(10)
        return capsys.readouterr().err

    assert work() == ""
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    assert "Loading weights" in work()
    assert work(shown=False) == ""
    monkeypatch.setattr(progress, "is_tqdm_available", lambda: False)
    assert work() == ""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_bytes_come_from_the_file_whose_header_was_read(tmp_path: Path) -> None:
    state = {"a": torch.randn(5, 3), "b": torch.randn(7).half()}
    folder = save(tmp_path, state)
    contents = CheckpointContents(find_checkpoint(folder))
    before = CheckpointContents(find_checkpoint(folder))
    for name, tensor in state.items():
        source: Any = contents.byte_source(name)
        assert isinstance(source, FileBytes)
        read = torch.zeros(tensor.nbytes - 2, dtype=torch.uint8)
        source.read_into(read, 2)
        assert torch.equal(read, bytes_of(tensor)[2:])
    with pytest.raises(OSError, match="truncated"):
        source.read_into(torch.empty(1000, dtype=torch.uint8), 0)
    save(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    source = before.byte_source("a")
    assert isinstance(source, MemoryBytes), "another file has its name now"
    read = torch.zeros(state["a"].nbytes, dtype=torch.uint8)
    source.read_into(read, 0)
    assert torch.equal(read, bytes_of(state["a"]))


@pytest.mark.parametrize("num_cached", [0, 10, None])
def test_what_is_not_in_the_page_cache_is_read_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cached: int | None
) -> None:
    tensor = torch.randn(100)
    contents = CheckpointContents(find_checkpoint(save(tmp_path, {"a": tensor})))
    source: Any = contents.byte_source("a")
    preadv = os.preadv

    def as_cached(descriptor: int, buffers: Any, position: int, flags: int = 0) -> int:
        """As the system answers when so many bytes are in memory; None: when it cannot tell."""
        if not flags:
            return preadv(descriptor, buffers, position)
        if not num_cached:
            raise OSError(errno.EAGAIN if num_cached == 0 else errno.EOPNOTSUPP, "")
        return preadv(descriptor, [buffers[0][:num_cached]], position)

    monkeypatch.setattr(os, "preadv", as_cached)
    read = torch.zeros(tensor.nbytes - 4, dtype=torch.uint8)
    source.read_into(read, 4)
    assert torch.equal(read, bytes_of(tensor)[4:])


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, once in a process
def test_bytes_of_files_of_torch_are_those_of_contiguous_tensors(tmp_path: Path) -> None:
    state = {
        "turned": torch.randn(3, 5).t(),
        "sparse": torch.eye(3).to_sparse(),
        "turned back": torch.ones(3).cfloat().conj(),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    contents = CheckpointContents(find_checkpoint(tmp_path / "pytorch_model.bin"))
    source: Any = contents.byte_source("turned")
    read = torch.zeros(60, dtype=torch.uint8)
    source.read_into(read, 0)
    assert torch.equal(read.view(torch.float32).view(5, 3), state["turned"])
    assert contents.byte_source("sparse") is None


# ---- several processes ------------------------------------------------------------------------------------------


@ranks(2)
def test_the_first_process_reads_for_all_and_all_hear_of_what_cannot_be_read(
    rank: int, world: int, tmp_path: Path
) -> None:
    state = weights()
    if rank == 0:
        save(tmp_path, state)
    torch.distributed.barrier()
    path = tmp_path / "ckpt" if rank == 0 else tmp_path / "elsewhere"
    model = Model()
    load_checkpoint_in_model(model, path, broadcast_from_rank0=True, strict=True)
    assert_holds(model, state)
    load_checkpoint_in_model(model, path, broadcast_from_rank0=True, dtype=torch.float64)
    assert_holds(model, state)
    with pytest.raises((ValueError, RuntimeError), match="There is no checkpoint"):
        load_checkpoint_in_model(model, tmp_path / "none", broadcast_from_rank0=True)


@ranks(2)
@pytest.mark.parametrize("broadcast", [True, False])
def test_sharded_models_get_their_parts(rank: int, world: int, tmp_path: Path, broadcast: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    state = weights()
    if rank == 0:
        save(tmp_path, state, max_shard_size=60)
    torch.distributed.barrier()
    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (world,)))
    load_checkpoint_in_model(model, tmp_path / "ckpt", broadcast_from_rank0=broadcast, strict=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), state[name])  # type: ignore[attr-defined]


def test_broadcasting_needs_processes_and_no_map(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="needs a process group"):
        load_checkpoint_in_model(Model(), tmp_path, broadcast_from_rank0=True)
    with pytest.raises(ValueError, match="cannot be combined"):
        load_checkpoint_in_model(Model(), tmp_path, device_map=WHOLE_ON_CPU, broadcast_from_rank0=True)
