"""Which part of a model goes to which device."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel import (
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    dispatch_model,
    find_tied_parameters,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from accel_bigmodel.device_map.check import check_device_same
from accel_bigmodel.device_map.modules import fallback_allocate
from accel_bigmodel.device_map.plan import get_module_size_with_ties
from tests.bigmodel.trees import Block, Group, models


def small_model() -> nn.Module:
    """166 + 80 + 80 bytes, and a head that shares the embedding."""
    block = Block()
    block.a, block.n = nn.Linear(4, 4), nn.BatchNorm1d(4)
    block.register_buffer("b", torch.zeros(2), persistent=False)
    block.p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    model = nn.Sequential(block, nn.Linear(4, 4))
    model.emb, model.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    model.head.weight = model.emb.weight
    return model


@pytest.mark.parametrize(
    ("max_memory", "expected"),
    [
        # on device 0 and in CPU memory there stays room for the 80 bytes of the largest part to come
        ({0: 100, "cpu": 300}, {"0.p": 0, "0.a": "cpu", "0.n": "cpu", "0.b": "cpu", "1": "disk", "emb": "disk"}),
        ({0: 200, 1: 200, "cpu": 1000}, {"0.p": 0, "0.a": 0, "0.n": 1, "0.b": 1, "1": 1, "emb": "cpu"}),
        ({0: 350}, {"": 0}),
        ({"cpu": 100}, {"0.p": "cpu", "0.a": "disk", "0.n": "disk", "0.b": "disk", "1": "disk", "emb": "disk"}),
    ],
)
def test_devices_are_filled_in_order(max_memory: dict[Any, int], expected: dict[str, Any]) -> None:
    if "" not in expected:
        expected["head"] = expected["emb"]  # it shares the embedding
    assert infer_auto_device_map(small_model(), max_memory, offload_buffers=True) == OrderedDict(expected)


def test_classes_stay_whole_and_buffers_that_would_not_fit_are_pointed_out() -> None:
    actual = infer_auto_device_map(small_model(), {0: 200, 1: 200, "cpu": 1000}, no_split_module_classes="Block")
    assert actual == OrderedDict({"0": 1, "1": "cpu", "emb": "cpu", "head": "cpu"})
    with pytest.warns(UserWarning, match=r"48 bytes.*offload_buffers=True"):
        infer_auto_device_map(small_model(), {0: 100, "cpu": 300})


@given(
    models(),
    st.lists(st.floats(0, 1), max_size=3),
    st.one_of(st.none(), st.floats(0, 1)),
    st.sampled_from([[], ["Block"], ["Block", "Group"]]),
    st.booleans(),
    st.booleans(),
)
def test_every_tensor_gets_one_device_and_no_limit_is_exceeded(
    model: nn.Module,
    accelerators: list[float],
    main_memory: float | None,
    whole: list[str],
    clean: bool,
    fallback: bool,
) -> None:
    sizes = compute_module_sizes(model)
    limits: dict[Any, int] = {number: int(part * sizes[""]) for number, part in enumerate(accelerators)}
    if main_memory is not None or not limits:
        limits["cpu"] = int((main_memory or 0) * sizes[""])
    device_map = infer_auto_device_map(
        model, limits, whole, clean_result=clean, offload_buffers=True, fallback_allocation=fallback
    )
    check_device_map(model, device_map)
    place = {name: place_of(name, device_map) for name in sizes if name not in dict(model.named_modules())}
    for device, limit in limits.items():
        assert sum(sizes[name] for name, where in place.items() if where == device) <= limit
    for group in find_tied_parameters(model):
        assert len({place_of(name, device_map) for name in group}) == 1
    for name, module in model.named_modules():
        if name and type(module).__name__ in whole:
            assert len({where for tensor, where in place.items() if tensor.startswith(f"{name}.")}) <= 1


def place_of(name: str, device_map: dict[str, Any]) -> Any:
    while name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


def test_a_part_that_fits_is_found_further_on() -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(3, 3), nn.Linear(50, 50))  # 10,200, 48 and 10,200 bytes
    limits = {0: 15_000, "cpu": 40_000}
    assert infer_auto_device_map(model, limits) == OrderedDict({"": "cpu"})
    assert infer_auto_device_map(model, limits, fallback_allocation=True) == {"1": 0, "0": "cpu", "2": "cpu"}
    name, part, rest = fallback_allocate(list(model.named_children()), compute_module_sizes(model), 10)
    assert (name, part, len(rest)) == (None, None, 3)


def test_what_shares_parameters_is_counted_together_and_once_where_sizes_have_it_under_each_name() -> None:
    model = small_model()
    sizes = compute_module_sizes(model)
    children = list(model.named_children())
    assert get_module_size_with_ties(["head.weight"], 80, sizes, children) == (80, ["head"], [model.head])
    assert get_module_size_with_ties([], 80, sizes, children) == (80, [], [])
    names = ("1", "10", "2")
    parts = [(name, nn.Linear(10, 10)) for name in names]
    sizes = {name: 440 for name in names} | {f"{name}.weight": 400 for name in names}
    sizes |= {f"{name}.bias": 40 for name in names}
    weights = [f"{name}.weight" for name in names]
    actual = get_module_size_with_ties(weights, 440, sizes, parts)
    assert actual == (440 + 3 * 40, list(names), [part for _, part in parts])
    assert get_module_size_with_ties([*weights, "2.weight", "2.bias"], 440, sizes, parts)[0] == 440 + 2 * 40
    assert get_module_size_with_ties(["1"], 440, {"1": 440}, [("1", parts[0][1].weight)])[0] == 440


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (
            {0: 256, "cpu": 10_000},
            "0: 256 bytes, where module.a needs 336 (160 of them for running offloaded modules)",
        ),
        ({0: 256, 1: 100, "cpu": 10_000}, "modules); 1: 100 bytes, where module.a needs 176)"),
        ({0: 500, "cpu": 0}, None),  # all fits before CPU memory is reached
        ({0: 400, "cpu": 10}, "(cpu: 10 bytes, where module.b needs 240"),
        ({"cpu": 10_000}, None),
    ],
)
def test_devices_on_which_nothing_fits_are_told(
    limits: dict[Any, int], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    inner = nn.Sequential(OrderedDict(a=nn.Linear(10, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 8)))
    model = nn.Sequential(OrderedDict(module=inner))  # 176, 80 and 160 bytes
    with caplog.at_level(logging.INFO):
        infer_auto_device_map(model, limits)
    records = [record for record in caplog.records if record.levelno == logging.INFO]
    assert [record.name for record in records] == ["accelerate.utils.modeling"] * (told is not None)
    assert told is None or ("insufficient memory" in caplog.text and told in caplog.text)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        infer_auto_device_map(model, {0: 256}, fallback_allocation=True)
    assert "insufficient" not in caplog.text


def test_maps_are_cleaned() -> None:
    assert clean_device_map({"a.b": 0, "a.c": 0, "d": 1, "a.e.f": 0}) == {"a": 0, "d": 1}
    assert clean_device_map({"a": 0, "b": 0}) == {"": 0}
    assert clean_device_map({"a": 0}) == {"a": 0}
    assert clean_device_map({"x.a": 0, "x.b": 1, "x.c.d": 1, "x.c.e": 1}) == {"x.a": 0, "x.b": 1, "x.c": 1}


def test_names_that_are_left_out_or_that_the_model_has_not_are_refused_or_warned_of() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"device map has no device for.*1\.weight.*emb\.weight"):
        check_device_map(model, {"0": 0})
    device_map = {"0": 0, "1": 0, "emb": 0, "head": 0, "had": 0}
    problem = r"device_map keys do not match any submodules of .*: 'had'.*Did you mean 'head'"
    with pytest.warns(UserWarning, match=problem):
        check_device_map(model, device_map)
    with pytest.raises(ValueError, match=problem):
        check_device_map(model, device_map, strict=True)
    on_cpu = dict.fromkeys(device_map, "cpu")
    with pytest.warns(UserWarning, match="'had'"):
        assert dispatch_model(model, on_cpu).hf_device_map == on_cpu
    with pytest.raises(ValueError, match="'had'"):
        dispatch_model(model, on_cpu, strict=True)


def test_budgets_are_spread_evenly() -> None:
    model = small_model()
    assert get_balanced_memory(model, {0: 1000, 1: 1000, "cpu": 1000}) == {0: 260, 1: 1000, "cpu": 1000}
    assert get_balanced_memory(model, {0: 1000, 1: 1000, 2: 500}, low_zero=True) == {0: 0, 1: 260, 2: 500}
    assert get_balanced_memory(model, {"cpu": 10}) == {"cpu": 10}
    assert get_balanced_memory(model, {0: 1000, 1: 1000}, no_split_module_classes=["Block"])[0] == 163 + 207


def test_budgets_are_read_in_order_and_devices_compared() -> None:
    actual = get_max_memory({"disk": 1, "cpu": "1GB", 1: "2GiB", 0: 5})
    assert list(actual.items()) == [(0, 5), (1, 2 << 30), ("cpu", 10**9), ("disk", 1)]
    assert get_max_memory()["cpu"] > 0
    assert check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cuda:1"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cpu"), torch.device("cuda"))
    assert check_device_same(torch.device("cpu"), torch.device("cpu", 0))


def test_a_model_that_is_not_tied_yet_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    class PreTrainedModel(Group):
        config = type("Config", (), {"tie_word_embeddings": True})

        def get_output_embeddings(self) -> nn.Module:
            return self

    model = PreTrainedModel()
    model.emb, model.head = nn.Embedding(5, 4), nn.Linear(4, 5)
    infer_auto_device_map(model, {"cpu": 1000}, verbose=True)
    assert "tie_weights" in caplog.text
