"""What a checkpoint's path means."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_bigmodel.weights.index import find_checkpoint


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def write_index(path: Path, weight_map: Any) -> Path:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def names(folder: Path) -> list[str]:
    return [path.name for path in find_checkpoint(folder).files]


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.pt", "blob"])
def test_one_file(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    actual = find_checkpoint(tmp_path / name)
    assert (actual.files, actual.weight_map) == ((tmp_path / name,), {})
    assert find_checkpoint(str(tmp_path / name)).files == (tmp_path / name,)


def test_folders(tmp_path: Path) -> None:
    assert names(make(tmp_path / "bin", "pytorch_model.bin", "config.json")) == ["pytorch_model.bin"]
    assert names(make(tmp_path / "safe", "model.safetensors", "pytorch_model.bin")) == ["model.safetensors"]
    sharded = make(tmp_path / "sharded", "b", "a", "pytorch_model.bin")
    write_index(sharded / "any.index.json", {"x": "b", "y": "a", "z": "b"})
    assert names(sharded) == ["b", "a"]
    actual = find_checkpoint(sharded / "any.index.json")
    assert actual.weight_map == {"x": sharded / "b", "y": sharded / "a", "z": sharded / "b"}


def test_an_index_called_index_json_with_shards_of_any_name(tmp_path: Path) -> None:
    folder = make(tmp_path / "plain", "first_state_dict.bin", "second_state_dict.bin")
    table = {"linear1.weight": "first_state_dict.bin", "linear2.weight": "second_state_dict.bin"}
    (folder / "index.json").write_text(json.dumps(table))
    assert names(folder) == ["first_state_dict.bin", "second_state_dict.bin"]
    assert find_checkpoint(folder / "index.json").weight_map == {name: folder / file for name, file in table.items()}
    write_index(folder / "my_map.json", table)
    assert find_checkpoint(folder / "my_map.json").weight_map == find_checkpoint(folder).weight_map
    (folder / "index.json").write_text(
        json.dumps({"weight": {"dtype": "float32", "shape": [1]}})
    )  # of an offload folder
    make(folder, "pytorch_model.bin")
    assert names(folder) == ["pytorch_model.bin"]


def test_an_index_that_is_nothing_but_the_table_and_files_that_a_cache_links_to(tmp_path: Path) -> None:
    make(tmp_path, "a", "b", "blobs/123")
    (tmp_path / "m.index.json").write_text(json.dumps({"x": "b", "weight_map.bias": "a"}))
    assert find_checkpoint(tmp_path).weight_map == {"x": tmp_path / "b", "weight_map.bias": tmp_path / "a"}
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model-1.safetensors").symlink_to(tmp_path / "blobs" / "123")
    write_index(folder / "model.safetensors.index.json", {"x": "model-1.safetensors"})
    assert names(folder) == ["model-1.safetensors"]


def test_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "config.json")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    make(tmp_path, "other.safetensors")
    with pytest.raises(ValueError, match=r"if one of these is meant: other\.safetensors"):
        find_checkpoint(tmp_path)
    for missing in (tmp_path / "none", str(tmp_path / "none"), "none.safetensors", "./none", "a/b/c"):
        with pytest.raises(ValueError, match="There is no checkpoint"):
            find_checkpoint(missing)


def test_missing_shards_and_several_indexes_are_named(tmp_path: Path) -> None:
    make(tmp_path, "a")
    write_index(tmp_path / "one.index.json", {"x": "a", "y": "b", "z": "c"})
    with pytest.raises(FileNotFoundError, match="names 3 files, of which 2 are missing: b, c"):
        find_checkpoint(tmp_path)
    write_index(tmp_path / "two.index.json", {"x": "a"})
    with pytest.raises(ValueError, match=r"several indexes, one\.index\.json, two\.index\.json"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path / "two.index.json").files == (tmp_path / "a",)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "link/secret", "c:\\secret", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path, "secret")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    write_index(folder / "m.index.json", {"x": name})
    with pytest.raises(ValueError, match="do not use it"):
        find_checkpoint(folder)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", "3", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}', "[" * 99_999,
        '{"weight_map": "a"}', '{"metadata": {}, "x": "a"}',
    ],
)  # fmt: skip
def test_damaged_indexes_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.index.json").write_text(text)
    with pytest.raises(ValueError, match="is not a checkpoint index"):
        find_checkpoint(tmp_path)


# ---- the Hub ----------------------------------------------------------------------------------------------------


class FakeHub:
    """A repository, as `hf_hub_download` gives it."""

    def __init__(self, folder: Path, error: type[Exception] | None = None) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.error = error

    def __call__(self, repository: str, name: str) -> str:
        from huggingface_hub.errors import EntryNotFoundError

        self.asked.append(name)
        if self.error is not None:
            raise self.error(f"no {repository}\nand more")
        if not (self.folder / name).exists():
            raise EntryNotFoundError(f"no {name}")
        return str(self.folder / name)


def test_a_repository_is_fetched_unless_it_names_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a", "b", "unrelated")
    write_index(tmp_path / "model.safetensors.index.json", {"x": "a", "y": "b"})
    hub = FakeHub(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    actual = find_checkpoint("somebody/a-model")
    assert actual.files == (tmp_path / "a", tmp_path / "b")
    assert hub.asked == ["model.safetensors", "model.safetensors.index.json", "a", "b"]
    write_index(tmp_path / "model.safetensors.index.json", {"x": "../a"})
    with pytest.raises(ValueError, match="do not use it"):
        find_checkpoint("somebody/a-model")
    assert "../a" not in hub.asked
    make(tmp_path, "model.safetensors")
    assert find_checkpoint("a-model").files == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize("error", [OSError, None])
def test_a_repository_that_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", FakeHub(tmp_path, error))
    with pytest.raises(
        ValueError,
        match=r"'some/model' is not a path, and no checkpoint of this name could be downloaded .*\(no [^\n]*\)",
    ):
        find_checkpoint("some/model")


def test_without_the_hub_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"There is no path 'some/model'.*pip install huggingface_hub"):
        find_checkpoint("some/model")
