"""Building models without memory, and what their parts take."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from accel_bigmodel import (
    align_module_device,
    calculate_maximum_sizes,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    find_tied_parameters,
    get_max_layer_size,
    init_empty_weights,
    init_on_device,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_bigmodel.sizes import compute_module_total_buffer_size, get_module_leaves, get_non_persistent_buffers
from accel_ops.modules import walk
from accel_state.enums import CustomDtype
from tests.bigmodel.test_device_map import small_model
from tests.bigmodel.trees import models


def test_a_model_larger_than_any_memory_is_built() -> None:
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in model.parameters()) == 100_010_000_000
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not nn.Linear(2, 2).weight.is_meta


def test_buffers_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(**kwargs: Any) -> tuple[str, str]:
        with init_empty_weights(**kwargs):
            layer = nn.BatchNorm1d(3)
        return layer.weight.device.type, layer.running_mean.device.type  # type: ignore[union-attr]

    assert devices() == devices(include_buffers=False) == ("meta", "cpu")
    assert devices(include_buffers=True) == ("meta", "meta")
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    assert devices() == ("meta", "meta")


def test_modules_register_as_ever() -> None:
    plain = nn.Module.register_parameter, nn.Module.register_buffer
    for include_buffers in (True, False):
        with init_empty_weights(include_buffers):
            assert (nn.Module.register_parameter, nn.Module.register_buffer) == plain
            module = nn.Module()
            module.register_parameter("none", None)
            module.register_parameter("given", nn.Parameter(torch.ones(2, device="cpu")))
            module.register_buffer("nothing", None)
            module.register_buffer("seen", torch.ones(2, device="cpu"))
            module.seen = torch.zeros(2, device="cpu")
        assert (module.none, module.nothing) == (None, None)
        assert (module.given.is_meta, module.seen.is_meta) == (True, include_buffers)


def test_parameters_keep_class_attributes_and_ties() -> None:
    class Special(nn.Parameter):
        pass

    with init_on_device(torch.device("meta")):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        special = Special(torch.ones(2), requires_grad=False)
        special.note = "kept"  # type: ignore[attr-defined]
        first.special = special
    assert second.weight is first.weight
    assert isinstance(first.special, Special)
    assert (first.special.note, first.special.requires_grad, first.special.is_meta) == ("kept", False, True)


def test_other_threads_build_as_ever_and_blocks_nest() -> None:
    built: list[nn.Linear] = []
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        outer = nn.Linear(2, 2)
    assert not inner.weight.is_meta
    assert not built[0].weight.is_meta
    assert outer.weight.is_meta


# ---- sizes ------------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    model = small_model()
    sizes = compute_module_sizes(model)
    assert {name: sizes[name] for name in ("", "0", "0.a", "0.n", "1", "emb", "head")} == {
        "": 326, "0": 166, "0.a": 80, "0.n": 72, "1": 80, "emb": 80, "head": 0,
    }  # fmt: skip
    half = compute_module_sizes(model, dtype=torch.float16)
    assert half[""] == 170, "integers and what is small already keep their size"
    assert half["0.n.num_batches_tracked"] == 8
    mixed = compute_module_sizes(model, dtype="float16", special_dtypes={"0.a.weight": torch.float32})
    assert mixed[""] == 170 + 32
    assert compute_module_sizes(model, buffers_only=True)[""] == compute_module_total_buffer_size(model) == 48
    assert calculate_maximum_sizes(model) == (326, (80, ["0.a", "1", "emb"]))
    model.table = nn.Parameter(torch.zeros(30))
    assert calculate_maximum_sizes(model) == (446, (120, ["table"])), "a tensor of the model itself"
    assert get_max_layer_size(list(model.named_children()), sizes, ["Block"]) == (166, ["0"])
    with pytest.raises(ValueError, match="float17"):
        compute_module_sizes(model, dtype="float17")


@given(models())
def test_sizes_add_up(model: nn.Module) -> None:
    sizes = compute_module_sizes(model)
    tensors = [*model.parameters(), *model.buffers()]
    assert sizes[""] == sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    assert sizes[""] == sum(sizes[name] for name in get_module_leaves(sizes))
    for name, module in model.named_modules():
        children = sum(sizes[f"{name}.{child}" if name else child] for child, _ in module.named_children())
        assert sizes[name] >= children


def test_element_sizes() -> None:
    actual = [
        dtype_byte_size(dtype) for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex64, *CustomDtype)
    ]
    assert actual == [0.125, 1, 2, 8, 1, 0.5, 0.25]


def test_sizes_in_words() -> None:
    sizes = {"1GB": 10**9, "1GiB": 1 << 30, "2.5 MB": 2_500_000, "3kb": 375, "7KIB": 7168, "1TB": 10**12, 77: 77}
    assert {text: convert_file_size_to_int(text) for text in sizes} == sizes
    for text in ("100", "GB", "1 elephant", "-1GB", ""):
        with pytest.raises(ValueError, match="is not a size"):
            convert_file_size_to_int(text)


def test_names_of_tensors() -> None:
    model = small_model()
    assert [name for name, _ in named_module_tensors(model[0])] == ["p", "b"]  # type: ignore[index]
    assert [name for name, _ in named_module_tensors(model[0], remove_non_persistent=True)] == ["p"]  # type: ignore[index]
    every = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert "0.n.running_mean" in every
    assert "0.b" not in every
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"0.b"}
    assert get_non_persistent_buffers(model, recurse=True) == {"b"}


# ---- shared parameters ------------------------------------------------------------------------------------------


def test_shared_parameters_are_found_and_tied_again(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    tied = find_tied_parameters(model)
    assert tied == [["emb.weight", "head.weight"]]
    shared = nn.Linear(2, 2)
    later = nn.ModuleDict({"z": shared, "y": nn.Linear(2, 2), "a": shared})
    assert find_tied_parameters(later) == [["a.weight", "z.weight"], ["a.bias", "z.bias"]]  # in the model's order
    model.head.weight = nn.Parameter(torch.empty(5, 4, device="meta"))  # type: ignore[union-attr]
    retie_parameters(model, [*tied, ["gone.weight", "nowhere.weight"]])
    assert model.head.weight is model.emb.weight  # type: ignore[union-attr]
    check_tied_parameters_on_same_device(tied, {"emb": 0, "head": 0})
    assert not caplog.records
    check_tied_parameters_on_same_device(tied, {"emb": 0, "head": 1})
    assert "head.weight" in caplog.text


# ---- single tensors ---------------------------------------------------------------------------------------------


def test_tensors_are_replaced_and_several_names_of_one_get_one_copy() -> None:
    model = small_model()
    layer: Any = model[1]  # type: ignore[index]
    weight = layer.weight.requires_grad_(False)
    set_module_tensor_to_device(model, "1.weight", "cpu")
    assert layer.weight is weight, "it is there already"
    set_module_tensor_to_device(model, "1.weight", "meta", dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    set_module_tensor_to_device(model, "1.weight", "meta", dtype="float32")
    assert layer.weight.is_meta
    assert not layer.weight.requires_grad
    set_module_tensor_to_device(model, "1.weight", "cpu", value=torch.ones(4, 4, dtype=torch.float64))
    assert layer.weight.dtype == torch.float32, "as it was"
    set_module_tensor_to_device(model, "1.weight", "cpu", value=torch.ones(4, 4), dtype="float16")
    assert layer.weight.dtype == torch.float16
    for integers in (torch.ones(4, 4, dtype=torch.int8), torch.ones(4, 4, dtype=torch.bool)):
        set_module_tensor_to_device(model, "1.weight", "cpu", value=integers)
        assert layer.weight.dtype == torch.float16, "as torch and accelerate 1.15 load them"
    set_module_tensor_to_device(model, "1.weight", "cpu", value=torch.ones(4, 4, dtype=torch.int8), dtype=torch.int8)
    assert layer.weight.dtype == torch.int8, "quantised"
    set_module_tensor_to_device(model, "0.n.running_mean", "cpu", value=torch.ones(4, dtype=torch.int64))
    assert model[0].n.running_mean.dtype == torch.float32  # type: ignore[index, union-attr]
    assert model[0].n.running_mean.tolist() == [1] * 4  # type: ignore[index, union-attr]
    value = torch.ones(4, 4)
    copies: dict[int, dict[Any, torch.Tensor]] = {value.data_ptr(): {}}
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    for layer in (first, second):
        set_module_tensor_to_device(layer, "weight", "cpu", value=value, tied_params_map=copies)
    assert first.weight is second.weight
    assert list(copies[value.data_ptr()]) == ["cpu"]


def test_what_cannot_be_put_there_is_refused() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"no parameter or buffer 'wait'.*weight"):
        set_module_tensor_to_device(layer, "wait", "cpu")
    with pytest.raises(ValueError, match=r"\(4, 4\).*\(2, 2\)"):
        set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    set_module_tensor_to_device(layer, "weight", "meta")
    with pytest.raises(ValueError, match="pass the value"):
        set_module_tensor_to_device(layer, "weight", "cpu")


def test_a_module_is_elsewhere_for_a_block() -> None:
    layer = nn.Linear(4, 4)
    weight, values = layer.weight, layer.weight.detach().clone()
    with align_module_device(layer, torch.device("meta")):
        assert layer.weight.is_meta
    assert layer.weight is weight
    assert torch.equal(weight, values)
    with align_module_device(layer):
        assert layer.weight is weight


@given(models())
def test_walking_meets_the_modules_that_torch_does(model: nn.Module) -> None:
    model.again = model.part0
    assert list(walk(model)) == list(model.named_modules())
    assert list(walk(model, repeat_shared=True)) == list(model.named_modules(remove_duplicate=False))
