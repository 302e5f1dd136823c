"""Random trees of modules."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn


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
