"""Names of tensors of a Hugging Face model, or of one of their rows: "experts.down_proj[3]" is the tensor of expert 3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

OF_ROW = re.compile(r"(.+)\[(\d+)\]")


def tensor_name(source: str) -> str:
    """The name of the tensor to which a source belongs."""
    match = OF_ROW.fullmatch(source)
    return source if match is None else match[1]


def rows_of(source: str, tensor: Tensor) -> Tensor:
    """The part of a tensor that a source means."""
    match = OF_ROW.fullmatch(source)
    return tensor if match is None else tensor[int(match[2])]


def look_up(tensors: Mapping[str, Tensor], source: str) -> Tensor:
    """The tensor, or its row, that a source means."""
    return rows_of(source, tensors[tensor_name(source)])


def whole(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, with rows stacked.

    Args:
        found: By source; of a tensor all rows or none.
    """
    rows: dict[str, list[Any]] = {}
    for source in found:
        rows.setdefault(tensor_name(source), []).append(source)
    return {
        name: found[name] if sources == [name] else torch.stack([found[one] for one in sorted(sources, key=_number)])
        for name, sources in rows.items()
    }


def _number(source: str) -> int:
    match = OF_ROW.fullmatch(source)
    assert match is not None
    return int(match[2])
