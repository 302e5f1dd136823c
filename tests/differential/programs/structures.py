"""Nested structures: what comes out of every function that walks through them, in one process."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from record import done, record

from accelerate.utils import (
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    gather,
    gather_object,
    get_data_structure,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    listify,
    pad_across_processes,
    pad_input_tensors,
    recursively_apply,
    reduce,
    send_to_device,
    slice_tensors,
)
from accelerate.utils.operations import get_shape

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


class Point(NamedTuple):
    x: Any
    y: Any


class Single(NamedTuple):
    only: Any


class Encoding(collections.UserDict):
    """As a tokenizer returns it: a mapping, no dict, that moves itself."""

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) if hasattr(value, "to") else value for key, value in self.items()})


class Output(collections.OrderedDict):
    """As a model returns it: an ordered dict of a class of its own."""


class Records(MutableMapping):
    """A mapping that is no dict at all."""

    def __init__(self, content: Any = ()) -> None:
        self.content = dict(content)

    def __getitem__(self, key: Any) -> Any:
        return self.content[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class Own:
    """No tensor, but it can be moved."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: Any) -> Own:
        return Own(str(device))


class Maker:
    """Structures by chance, the same on every run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def tensor(
        self, dims: int | None = None, batch: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dims = self.random.randint(0, 3) if dims is None else dims
        shape = [self.random.randint(0 if place else 1, 4) for place in range(dims)]
        if batch is not None and shape:
            shape[0] = batch
        dtype = dtype or self.random.choice(DTYPES)
        return torch.randint(0, 9, shape, generator=self.generator).to(dtype)

    def leaf(self, only_tensors: bool, **options: Any) -> Any:
        if only_tensors or self.random.random() < 0.8:
            return self.tensor(**options)
        return self.random.choice([None, 3, 2.5, "text", True, Own(), torch.float16, b"bytes", {1, 2}])

    def structure(self, depth: int, only_tensors: bool = False, **options: Any) -> Any:
        if depth == 0 or self.random.random() < 0.15:
            return self.leaf(only_tensors, **options)
        inner = [
            self.structure(depth - 1, only_tensors, **options) for _ in range(self.random.choice([0, 1, 2, 2, 3]))
        ]
        names = [self.random.choice(["a", "b", "ids", 7]) for _ in inner]
        kind = self.random.choice([list, tuple, dict, Output, Encoding, Records, Point, Single])
        if kind is Point:
            return Point(*(self.structure(depth - 1, only_tensors, **options) for _ in range(2)))
        if kind is Single:
            return Single(self.structure(depth - 1, only_tensors, **options))
        return kind(inner) if kind in (list, tuple) else kind(zip(names, inner, strict=True))


def same_structure_again(maker: Maker, value: Any, batch: int) -> Any:
    """The same structure with another batch size."""
    if isinstance(value, torch.Tensor):
        shape = [batch, *value.shape[1:]] if value.dim() else []
        return torch.randint(0, 9, shape, generator=maker.generator).to(value.dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(same_structure_again(maker, item, batch) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(same_structure_again(maker, item, batch) for item in value)
    if isinstance(value, dict | collections.UserDict | Records):
        return type(value)({key: same_structure_again(maker, item, batch) for key, item in value.items()})
    return value


def anything(number: int) -> None:
    """Functions that take any structure."""
    value = Maker(number).structure(depth=number % 4)
    functions = {
        "find_batch_size": find_batch_size,
        "ignorant_find_batch_size": ignorant_find_batch_size,
        "find_device": find_device,
        "convert_to_fp32": convert_to_fp32,
        "convert_outputs_to_fp32": lambda value: convert_outputs_to_fp32(lambda: value)(),
        "listify": listify,
        "get_data_structure": get_data_structure,
        "get_shape": get_shape,
        "is_torch_tensor": is_torch_tensor,
        "is_namedtuple": is_namedtuple,
        "is_tensor_information": is_tensor_information,
        "send_to_device": lambda value: send_to_device(value, "cpu"),
        "send_to_meta": lambda value: send_to_device(value, "meta"),
        "send_to_device_object": lambda value: send_to_device(value, torch.device("meta"), non_blocking=True),
        "send_but": lambda value: send_to_device(value, "meta", skip_keys="ids"),
        "send_but_many": lambda value: send_to_device(value, "meta", skip_keys=["a", 7]),
        "gather": gather,
        "gather_object": gather_object,
        "reduce": reduce,
        "reduce_scaled": lambda value: reduce(value, "sum", 3.0),
        "pad_across_processes": pad_across_processes,
        "recursively_apply": lambda value: recursively_apply(lambda tensor: tensor + 1, value),
        "recursively_apply_strict": lambda value: recursively_apply(
            lambda tensor, more: tensor.shape[0] + more if tensor.dim() else more, value, 4, error_on_other_type=True
        ),
        "recursively_apply_to_strings": lambda value: recursively_apply(
            lambda text, end="": text + end, value, test_type=lambda leaf: isinstance(leaf, str), end="!"
        ),
        "slice_tensors": lambda value: slice_tensors(value, slice(1, 3)),
        "honor_list": lambda value: honor_type([0], (item for item in (value, 1))),
    }
    for name, function in functions.items():
        record(f"{name} {number}", lambda function=function: function(Maker(number).structure(depth=number % 4)))
    record(f"structure_of {number}", lambda: initialized(get_data_structure(value)))


def initialized(structure: Any) -> Any:
    """Shapes and types of what `initialize_tensors` makes: its values are whatever memory held."""
    return get_data_structure(initialize_tensors(structure))


def batches(number: int) -> None:
    """Functions that take batches of tensors."""
    maker = Maker(10_000 + number)
    value = maker.structure(depth=number % 3 + 1, only_tensors=True, dims=number % 3 + 1, batch=4)
    others = [same_structure_again(maker, value, batch) for batch in (2, 0, 3)]
    record(f"concatenate {number}", lambda: concatenate([value, *others]))
    record(f"concatenate_one {number}", lambda: concatenate([value]))
    record(f"concatenate_dim {number}", lambda: concatenate([value, value], dim=number % 3))
    record(f"batch_size {number}", lambda: find_batch_size(value))
    record(f"slices {number}", lambda: [slice_tensors(value, slice(a, a + 2)) for a in range(0, 5)])
    record(f"index {number}", lambda: slice_tensors(value, 0))
    for processes in (2, 3, 5):
        record(f"pad_input_tensors {number} {processes}", lambda p=processes: pad_input_tensors(value, 4, p))
        record(f"pad_input_dim {number} {processes}", lambda p=processes: pad_input_tensors(value, 4, p, dim=1))
    record(f"empty_structure {number}", lambda: initialized(get_data_structure(value)))


def edges() -> None:
    """What is easily forgotten."""
    odd = {
        "none": None, "text": "abc", "empty_list": [], "empty_dict": {}, "empty_tuple": (), "number": 3, "set": {1},
        "scalar": torch.tensor(3.0), "empty_tensor": torch.zeros(0, 3), "nested_empty": [[], {"a": ()}],
        "range": range(3), "generator": (n for n in range(2)), "tensor_subclass": torch.nn.Parameter(torch.ones(2)),
        "defaultdict": collections.defaultdict(list, {"x": torch.ones(2, dtype=torch.bfloat16)}),
        "ordered": collections.OrderedDict(b=torch.ones(1), a=torch.ones(2)),
        "deque": collections.deque([torch.ones(2)]), "shape": torch.Size([2, 3]), "strings": ["a", "b"],
        "mixed": [1, torch.ones(3), "x"], "sparse": torch.eye(2).to_sparse(), "complex": torch.ones(2, dtype=torch.complex64),
        "class": Point, "bool": True, "bytes": b"x",
    }  # fmt: skip
    functions: dict[str, Any] = {
        "find_batch_size": find_batch_size, "ignorant": ignorant_find_batch_size, "find_device": find_device,
        "fp32": convert_to_fp32, "gather": gather, "gather_object": gather_object, "reduce": reduce,
        "pad": pad_across_processes, "concatenate": lambda value: concatenate([value, value]),
        "slice": lambda value: slice_tensors(value, slice(0, 1)), "send": lambda value: send_to_device(value, "cpu"),
        "structure": get_data_structure, "listify": listify, "pad_input": lambda value: pad_input_tensors(value, 3, 2),
    }  # fmt: skip
    for (what, value), (name, function) in ((a, b) for a in odd.items() for b in functions.items()):
        if "sparse" in what and name in ("listify", "slice"):
            continue
        record(f"edge {name} {what}", lambda function=function, value=value: function(value))
    for obj in ([1], (1,), Point(1, 2), Single(1), Output(a=1)):
        record(
            f"honor_type {type(obj).__name__}",
            lambda obj=obj: honor_type(obj, iter([("k", 4)] if isinstance(obj, dict) else range(2))),
        )


if __name__ == "__main__":
    for number in range(260):
        anything(number)
    for number in range(150):
        batches(number)
    edges()
    done()
