"""Activations that are the same in transformers and here, and the error for what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.nn import functional as F

ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
}


def activation(name: str) -> Callable[..., Any]:
    """An activation by its name in a configuration of transformers.

    Raises:
        ValueError: It is not in the table.
    """
    if name not in ACTIVATIONS:
        raise lacks(f"the activation {name!r}", f"one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def lacks(what: str, instead: str) -> ValueError:
    """The error for a configuration that megatron-core cannot compute."""
    return ValueError(f"The model's configuration has {what}, which is not mapped to Megatron-LM. Use {instead}.")
