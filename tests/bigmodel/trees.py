"""Random trees of modules, and where their weights lie."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn


def mapped_file(tensor: torch.Tensor) -> str:
    """The file in whose mapping a tensor lies; "" for one in memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.split()[-1]
    return ""


def saved_and_loaded(data: Any, weights_only: bool = False) -> Any:
    """A model or a state as `torch.save` and `torch.load` make it anew."""
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)  # noqa: TID251 - as programs do


class Block(nn.Module):
    """A module that may be asked to stay whole."""


class Group(nn.Module):
    """A module that may be taken apart."""


def leaf(kind: int, size: int) -> nn.Module:
    """A module without children."""
    return (nn.Linear(size, 3, bias=size % 2 == 0), nn.Embedding(size, 4), nn.BatchNorm1d(size))[kind % 3]


@st.composite
def modules(draw: Any, depth: int = 3) -> nn.Module:
    """A tree of modules with parameters and buffers at all levels."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return leaf(draw(st.integers(0, 2)), draw(st.integers(1, 8)))
    module = draw(st.sampled_from([Block, Group]))()
    for number in range(draw(st.integers(1, 3))):
        setattr(module, f"part{number}", draw(modules(depth - 1)))
    if draw(st.booleans()):
        module.scale = nn.Parameter(torch.ones(draw(st.integers(1, 5))))
    if draw(st.booleans()):
        module.register_buffer("offset", torch.ones(draw(st.integers(1, 5))), persistent=draw(st.booleans()))
    return module


@st.composite
def models(draw: Any) -> nn.Module:
    """A model; some share parameters between embeddings."""
    model = Group()
    for number in range(draw(st.integers(1, 4))):
        setattr(model, f"part{number}", draw(modules()))
    embeddings = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    if len(embeddings) > 1 and draw(st.booleans()):
        embeddings[-1].weight = embeddings[0].weight
    return model
