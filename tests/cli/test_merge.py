"""`accelerate merge-weights`: from the sharded weights of FSDP to a model folder."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel.weights.write import SAFETENSORS, TORCH
from accel_cli.main import main
from accel_integrations.training_state import merge as merging
from accel_integrations.training_state.formats.shards import ShardedModel, find_sharded_folder
from accel_integrations.training_state.merge import merge_fsdp_weights, write_merged
from accel_ops.files.serialization import load
from accel_ops.files.tensor_files import read_tensors
from tests.cli.running import refusal
from tests.support.ranks import ranks


def make_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(7, 5), nn.Linear(5, 9, dtype=torch.bfloat16), nn.BatchNorm1d(9), nn.Linear(9, 1)
    )
    model.register_buffer("empty", torch.zeros(0, 4))
    model.register_buffer("scale", torch.tensor(2.5, dtype=torch.float64))
    return model


def save_sharded(content: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(content, checkpoint_id=folder)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """What one process saves."""
    folder = tmp_path / "state" / "pytorch_model_fsdp_0"
    save_sharded({"model": make_model().state_dict()}, folder)
    return folder


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@ranks(2)
def test_shards_of_two_processes_become_the_model(rank: int, world: int, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    save_sharded({"model": get_model_state_dict(model)}, tmp_path / "pytorch_model_fsdp_0")
    assert len(list((tmp_path / "pytorch_model_fsdp_0").glob("*.distcp"))) == world
    merge_fsdp_weights(tmp_path / "pytorch_model_fsdp_0", tmp_path / "safe")
    merge_fsdp_weights(str(tmp_path), str(tmp_path / "pickled"), safe_serialization=False, remove_checkpoint_dir=True)
    assert_same(read_tensors(tmp_path / "safe" / "model.safetensors"), make_model().state_dict())
    assert_same(load(tmp_path / "pickled" / "pytorch_model.bin"), make_model().state_dict())
    assert not (tmp_path / "pytorch_model_fsdp_0").exists()
    assert sorted(os.listdir(tmp_path)) == ["pickled", "safe"]


@pytest.mark.parametrize(
    ("words", "name"), [([], "model.safetensors"), (["--unsafe-serialization"], "pytorch_model.bin")]
)
def test_the_command_writes_a_model_folder(sharded: Path, words: list[str], name: str, tmp_path: Path) -> None:
    assert main(["merge-weights", str(sharded), str(tmp_path / "out"), *words]) == 0
    assert os.listdir(tmp_path / "out") == [name]
    read: Callable[[Path], Any] = load if words else read_tensors
    assert_same(read(tmp_path / "out" / name), make_model().state_dict())
    assert sharded.exists()


@pytest.mark.parametrize("form", [SAFETENSORS, TORCH])
def test_large_models_are_spread_over_files_with_an_index(sharded: Path, form: Any, tmp_path: Path) -> None:
    names = write_merged(ShardedModel(sharded), tmp_path / "out", form, max_shard_size=150)
    assert len(names) > 3
    index = json.loads((tmp_path / "out" / form.index_name).read_text())
    read: Callable[[Path], Any] = read_tensors if form.is_safetensors else load
    parts = {name: read(tmp_path / "out" / name) for name in names[:-1]}
    assert {key: name for name, part in parts.items() for key in part} == index["weight_map"]
    together = {key: tensor for part in parts.values() for key, tensor in part.items()}
    assert_same(together, make_model().state_dict())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in together.values())
    write_merged(ShardedModel(sharded), tmp_path / "out", form)  # in place of the shards
    assert os.listdir(tmp_path / "out") == [form.weights_name]


def test_files_of_others_are_kept_and_an_earlier_result_is_replaced(sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_text("old")
    merge_fsdp_weights(sharded, out)
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    assert_same(read_tensors(out / "model.safetensors"), make_model().state_dict())


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s, "step": 3}, lambda s: {"app": {"model": s}}])
def test_the_model_is_found_in_what_surrounds_it(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    save_sharded(wrap(make_model().state_dict()), tmp_path / "in")
    assert_same(
        {name: ShardedModel(tmp_path / "in").read_tensor(name) for name in make_model().state_dict()},
        make_model().state_dict(),
    )


def test_what_is_no_tensor_is_kept_where_the_format_allows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_sharded({"model": {"w": torch.ones(2), "_extra_state": {"amax": 3}}}, tmp_path / "in")
    merge_fsdp_weights(tmp_path / "in", tmp_path / "safe")
    assert "_extra_state" in caplog.text
    merge_fsdp_weights(tmp_path / "in", tmp_path / "pickled", safe_serialization=False)
    found = load(tmp_path / "pickled" / "pytorch_model.bin")
    assert [key for key in found if "_extra_state" in key]


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_a_metadata_file_runs_nothing(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (sharded / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="mkdir.* nothing of it was executed.*Do not trust"):
        merge_fsdp_weights(sharded, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_a_shard_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_sharded({"model": {"w": torch.ones(2)}}, tmp_path / "in")
    (shard,) = (tmp_path / "in").glob("*.distcp")
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    shard.write_bytes(buffer.getvalue().ljust(shard.stat().st_size, b"\0"))
    with pytest.raises(ValueError, match=r"__0_0.distcp"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / ".metadata").unlink(), "interrupted"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "lacks the file '__0_0.distcp'"),
        (
            lambda folder: rewrite(folder / ".metadata", lambda content: content[: len(content) // 2]),
            "metadata is damaged",
        ),
        (lambda folder: rewrite(folder / "__0_0.distcp", lambda content: content[:-100]), "is truncated"),
        (lambda folder: rewrite(folder / "__0_0.distcp", lambda content: b"x" * len(content)), "damaged"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "is not a sharded checkpoint"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})), "metadata is damaged"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(
    sharded: Path, damage: Callable[[Path], Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(sharded)
    assert message in refusal(capsys, "merge-weights", str(sharded), str(tmp_path / "out"), "--remove_checkpoint_dir")
    assert os.listdir(tmp_path) == ["state"]


WEIGHT = "model.3.weight"


def entry(contents: Any) -> Any:
    return contents.state_dict_metadata[WEIGHT]


def change_places(contents: Any, **values: Any) -> None:
    for place in contents.storage_data.values():
        vars(place).update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: vars(entry(found).chunks[0]).update(sizes=torch.Size([1, 10])), "lies outside its shape"),
        (lambda found: entry(found).chunks.clear(), f"the shards of '{WEIGHT}' have 0 elements"),
        (lambda found: found.storage_data.clear(), "does not say where a shard"),
        (lambda found: vars(entry(found)).update(size=torch.Size([-1, 9])), "'size' is"),
        (lambda found: found.state_dict_metadata.update({WEIGHT: 3}), "neither tensor nor bytes"),
        (lambda found: change_places(found, relative_path="../__0_0.distcp"), "not a plain path"),
        (lambda found: change_places(found, transform_descriptors=["stream.zstd"]), "storage extensions"),
        (lambda found: vars(entry(found).properties).update(dtype=torch.float16), "does not have dtype torch.float16"),
    ],
    ids=["large", "no part", "no place", "negative", "other kind", "outside", "encoded", "dtype"],
)
def test_contents_that_do_not_fit_are_refused(
    sharded: Path, change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    contents = pickle.loads((sharded / ".metadata").read_bytes())
    change(contents)
    (sharded / ".metadata").write_bytes(pickle.dumps(contents))
    with pytest.raises(ValueError, match=message):
        merge_fsdp_weights(sharded, tmp_path / "out")
    assert os.listdir(tmp_path) == ["state"]


def test_other_folders_are_told_apart(sharded: Path, tmp_path: Path) -> None:
    save_sharded({"optimizer": {"state": {"w": {"exp_avg": torch.ones(2)}}}}, tmp_path / "state" / "optimizer_0")
    assert find_sharded_folder(tmp_path / "state") == sharded
    with pytest.raises(ValueError, match="state of an optimizer"):
        merge_fsdp_weights(tmp_path / "state" / "optimizer_0", tmp_path / "out")
    shutil.copytree(sharded, tmp_path / "state" / "pytorch_model_fsdp_1")
    with pytest.raises(ValueError, match="2 sharded models"):
        merge_fsdp_weights(tmp_path / "state", tmp_path / "out")
    with pytest.raises(NotADirectoryError, match="is a file"):
        find_sharded_folder(sharded / ".metadata")


def test_the_output_must_be_a_folder_outside_of_what_is_removed(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        merge_fsdp_weights(sharded, tmp_path / "file")
    with pytest.raises(ValueError, match="Choose another output folder"):
        merge_fsdp_weights(sharded, sharded / "merged", remove_checkpoint_dir=True)
    assert sharded.exists()


def test_a_full_disk_leaves_everything_as_it_was(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(OSError, match="Not enough disk space"):
        merge_fsdp_weights(sharded, tmp_path / "out", remove_checkpoint_dir=True)
    assert os.listdir(tmp_path) == ["state"]
    assert sharded.exists()


def test_a_failure_in_the_middle_leaves_everything_as_it_was(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_fsdp_weights(sharded, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    read = ShardedModel.read_tensor

    def failing(self: ShardedModel, name: str) -> torch.Tensor:
        if name == "3.bias":
            raise OSError("the cable is out")
        return read(self, name)

    monkeypatch.setattr(ShardedModel, "read_tensor", failing)
    with pytest.raises(OSError, match="the cable is out"):
        merge_fsdp_weights(sharded, tmp_path / "out", remove_checkpoint_dir=True)
    assert sorted(os.listdir(tmp_path)) == ["out", "state"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert sharded.exists()


def test_at_most_one_tensor_is_in_memory(tmp_path: Path) -> None:
    from accel_cli.estimate.live_memory import LiveMemory

    save_sharded({"model": {f"w{i}": torch.ones(1000) for i in range(20)}}, tmp_path / "in")
    with LiveMemory() as memory, memory.during("merging") as phase:
        write_merged(ShardedModel(tmp_path / "in"), tmp_path / "out", SAFETENSORS)
    assert phase.peak_bytes <= 3 * 4000
