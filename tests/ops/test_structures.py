"""Nested structures in one process: mapping, cutting, joining, moving, packing."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ops.batches import (
    concatenate,
    find_batch_size,
    get_data_structure,
    get_shape,
    ignorant_find_batch_size,
    initialize_tensors,
    listify,
    pad_input_tensors,
    slice_tensors,
)
from accel_ops.collectives.packing import layout_of, pack, signature_of, unpack
from accel_ops.dtypes import ConvertOutputsToFp32, GatheredParameters, convert_outputs_to_fp32, convert_to_fp32
from accel_ops.modules import (
    get_model_tp_size,
    get_module_children_bottom_up,
    get_pretty_name,
    has_compiled_regions,
    has_offloaded_params,
    has_repeated_blocks,
    is_compiled_module,
    model_has_dtensor,
)
from accel_ops.nested import (
    TensorInformation,
    flatten,
    is_namedtuple,
    merge_dicts,
    rebuild,
    recursive_getattr,
    recursively_apply,
)
from accel_ops.placement import find_device, send_to_device
from tests.support.short_run import examples

Pair = namedtuple("Pair", "left right")
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip

tensors = st.builds(
    lambda dtype, shape, seed: (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 1000),
)
structures = st.recursive(
    tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(UserDict),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(lambda items: defaultdict(list, items)),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, (dict, UserDict)):
        factories = getattr(one, "default_factory", None), getattr(other, "default_factory", None)
        return (
            factories[0] is factories[1]
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    return all(map(same, one, other))


@examples(150)
@given(structures)
def test_structures_survive_packing(data: Any) -> None:
    leaves, _ = flatten(data, "test")
    if not leaves:
        return
    layout = layout_of(signature_of(leaves))
    assert same(rebuild(data, unpack(pack(leaves, layout), layout)), data)
    rows = torch.stack([pack(leaves, layout)] * 2)
    for leaf, joined in zip(leaves, unpack(rows, layout), strict=True):
        assert torch.equal(joined, torch.cat([leaf.reshape(leaf.shape or (1,))] * 2))


@examples(100)
@given(structures)
def test_mapping_keeps_types(data: Any) -> None:
    assert same(recursively_apply(lambda tensor: tensor.clone(), data), data)
    assert same(send_to_device(data, "cpu"), data)
    longer = recursively_apply(lambda leaf: leaf.float() if leaf.dtype in (torch.half, torch.bfloat16) else leaf, data)
    assert same(convert_to_fp32(data), longer)


def test_mapping_other_leaves() -> None:
    data = {"a": torch.ones(1), "b": ["text", None]}
    assert recursively_apply(lambda tensor: tensor + 1, data)["b"] == ["text", None]
    with pytest.raises(TypeError, match="'text' of type str"):
        recursively_apply(torch.neg, data, error_on_other_type=True)
    assert recursively_apply(len, ["ab", "c"], test_type=lambda item: isinstance(item, str)) == [2, 1]
    assert is_namedtuple(Pair(1, 2))
    assert not is_namedtuple((1, 2))


def test_batches() -> None:
    data = {"a": torch.arange(6).view(3, 2), "b": [torch.arange(3)]}
    assert find_batch_size(data) == 3
    for wrong, error in (([], ValueError), ("text", TypeError), (torch.tensor(1), ValueError)):
        with pytest.raises(error):
            find_batch_size(wrong)
        assert ignorant_find_batch_size(wrong) is None
    assert slice_tensors(data, slice(1, 2))["a"].tolist() == [[2, 3]]
    joined = concatenate([data, data])
    assert joined["a"].shape == (6, 2)
    assert concatenate([defaultdict(list, data)] * 2).default_factory is list
    assert isinstance(concatenate([Pair(torch.ones(1), torch.ones(2))] * 2), Pair)
    with pytest.raises(TypeError, match="'x'"):
        concatenate(["x", "y"])
    assert concatenate([{"words": "x", "numbers": data}])["words"] == "x"
    assert listify({"a": torch.tensor([1.5]).bfloat16()}) == {"a": [1.5]}
    assert get_shape(data) == {"a": [3, 2], "b": [[3]]}
    described = get_data_structure(data)
    assert described["b"] == [TensorInformation(torch.Size([3]), torch.int64)]
    assert initialize_tensors(described)["a"].shape == (3, 2)


@given(st.integers(1, 20), st.integers(1, 6))
def test_padding_a_batch(size: int, world: int) -> None:
    padded = pad_input_tensors({"a": torch.ones(size, 2), "other": torch.ones(size + 1)}, size, world)
    assert padded["a"].shape[0] % world == 0
    assert padded["a"].shape[0] - size < world
    assert padded["a"].sum() == 2 * size
    assert padded["other"].shape == (size + 1,)


def test_moving() -> None:
    class Movable:
        device = "cpu"

        def to(self, device: str) -> Movable:
            self.device = device
            return self

    moved = send_to_device(
        {"a": torch.ones(1), "b": Movable(), "c": "text", "d": torch.ones(1)}, "meta", skip_keys="d"
    )
    assert moved["a"].device.type == "meta"
    assert moved["b"].device == "meta"
    assert moved["c"] == "text"
    assert moved["d"].device.type == "cpu"
    assert find_device(["x", {"a": torch.ones(1)}]) == torch.device("cpu")
    assert find_device("x") is None


def test_float32_outputs() -> None:
    forward = convert_outputs_to_fp32(lambda x: {"y": x.bfloat16(), "n": 3, "z": (x.half(), x.double())})
    actual = forward(torch.ones(2))
    assert [actual["y"].dtype, actual["z"][0].dtype, actual["z"][1].dtype] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]
    assert isinstance(forward.__wrapped__, ConvertOutputsToFp32)  # type: ignore[attr-defined]
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(forward.__wrapped__)  # type: ignore[attr-defined]
    assert convert_to_fp32("text") == "text"
    with GatheredParameters([]):
        pass


def test_dictionaries_and_attributes() -> None:
    assert merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    assert recursive_getattr(model, "0.weight").shape == (3, 2)


def test_questions_about_models() -> None:
    blocks = torch.nn.Sequential(torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3)))
    assert has_repeated_blocks(blocks)
    assert not has_repeated_blocks(torch.nn.Linear(2, 2))
    compiled: Any = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert is_compiled_module(compiled)
    assert has_compiled_regions(torch.nn.Sequential(compiled))
    assert not is_compiled_module(blocks)
    assert not model_has_dtensor(blocks)
    assert get_model_tp_size(blocks) is None
    blocks.tp_size = 2  # type: ignore[assignment]
    assert get_model_tp_size(blocks) == 2
    blocks.tp_size = None  # type: ignore[assignment]  # as transformers 5 leaves it
    for noted in (SimpleNamespace(tp_size=4), {"tp_size": 4}):
        blocks.config = SimpleNamespace(distributed_config=noted)  # type: ignore[assignment]
        assert get_model_tp_size(blocks) == 4
    assert not has_offloaded_params(blocks)
    names = [name for name, _ in get_module_children_bottom_up(blocks, return_fqns=True)]
    assert names == ["0.0", "0.1", "0.2", "0", ""]
    assert get_module_children_bottom_up(blocks)[-1] is blocks
    assert get_pretty_name(torch.nn.Linear) == get_pretty_name(torch.nn.Linear(1, 1)) == "Linear"


def test_parameters_of_some_modules() -> None:
    from torch import nn

    from accel_ops.modules import get_parameters_from_modules

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert get_parameters_from_modules(None, model, "cpu") == set()
    assert get_parameters_from_modules(r"1.*", model, "cpu") == set(model[1].parameters())
    assert get_parameters_from_modules([model[0]], model, "cpu") == {model[0].weight, model[0].bias}
