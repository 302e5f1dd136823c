"""Safetensors files as the library writes them, and tied weights."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.testing._internal.two_tensor import TwoTensor

from accel_ops.files.tensor_files import (
    DTYPE_NAMES,
    clean_state_dict_for_safetensors,
    find_shared_names,
    read_tensors,
    write_tensors,
)


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    write_tensors(buffer, tensors, {"format": "pt"})
    return buffer.getvalue()


def examples() -> dict[str, torch.Tensor]:
    actual = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPE_NAMES}
    return {**actual, "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "ünïcode": torch.ones(1)}


def test_files_are_byte_for_byte_those_of_the_library(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(2), "h": torch.randn(3).bfloat16(), "o": torch.ones(1).bool()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert written(tensors) == (tmp_path / "theirs").read_bytes()


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(written(examples()))
    loaded = read_tensors(tmp_path / "x")
    for name, tensor in examples().items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True


def test_views_come_back_as_what_they_show(tmp_path: Path) -> None:
    base = torch.randn(4, 6, requires_grad=True)
    views = {"t": base.t(), "row": base[1], "step": base[:, ::2], "conj": torch.ones(2, dtype=torch.complex64).conj()}
    (tmp_path / "x").write_bytes(written(views))
    loaded = read_tensors(tmp_path / "x")
    assert all(torch.equal(loaded[name], view) for name, view in views.items())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "is a int"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.empty(1, device="meta"), "meta device"),
        (torch.ones(1, dtype=torch.complex128), "complex128"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=f"^'bad' .*{reason}"):
        written({"good": torch.ones(1), "bad": value})


def test_names_are_text_and_tensors_are_in_a_dict() -> None:
    with pytest.raises(TypeError, match="name 3 is not a str"):
        written({3: torch.ones(1)})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="not a list"):
        written([torch.ones(1)])  # type: ignore[arg-type]


def test_only_the_very_same_tensor_is_tied() -> None:
    base = torch.randn(4, 4)
    empty = torch.empty(0)
    state = {"a": base, "half": base[:2], "b": base.view(4, 4), "t": base.t(), "e": empty, "f": empty, "n": 3}
    assert find_shared_names(state) == [["a", "b"]]
    meta = torch.empty(2, device="meta")
    assert not find_shared_names({"a": meta, "b": torch.empty(2, device="meta")})


def test_tensors_that_wrap_others_are_told_apart_by_what_they_wrap() -> None:
    weight, other = (TwoTensor(torch.ones(2), torch.zeros(2)) for _ in range(2))
    state = {"a": weight, "b": other, "c": weight.detach()}  # of its own storage torch gives no address
    assert find_shared_names(state) == [["a", "c"]]


def test_a_cleaned_state_dict_is_contiguous_and_has_every_tensor_once() -> None:
    base = torch.randn(4, 6)
    cleaned = clean_state_dict_for_safetensors({"a": base, "b": base, "t": base.t()})
    assert list(cleaned) == ["a", "t"]
    assert cleaned["a"] is base
    assert cleaned["t"].is_contiguous()


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    content = written({"a": torch.zeros(100)})
    for bad in (b"", content[:5], content[:50], content[:-1], b"\xff" * 8 + content[8:], content[:8] + b"x" * 100):
        (tmp_path / "x.safetensors").write_bytes(bad)
        with pytest.raises(ValueError, match=r"x\.safetensors is damaged"):
            read_tensors(tmp_path / "x.safetensors")
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "none.safetensors")
