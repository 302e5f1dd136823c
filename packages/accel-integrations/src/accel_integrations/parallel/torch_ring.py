"""Torch's ring attention: private, and kept in another module, under another name, before torch 2.10."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EXPERIMENTAL = "torch.distributed.tensor.experimental"


def ring_attention() -> Any:
    """The module of torch that has the algorithm, its options and its operators."""
    try:
        return importlib.import_module(f"{_EXPERIMENTAL}._context_parallel._attention")
    except ModuleNotFoundError:  # torch 2.9
        return importlib.import_module(f"{_EXPERIMENTAL}._attention")


def ring_operators() -> dict[Any, Any]:
    """What context parallelism calls in place of an attention operator; entries may be added."""
    module = ring_attention()
    return getattr(module, "custom_ops", None) or module.customized_ops  # torch 2.9


@contextmanager
def restored_after_errors() -> Iterator[None]:
    """Undo what a block of context parallelism has patched when it raises, which torch 2.9 does not do."""
    from torch.distributed.tensor import DTensor
    from torch.nn import functional

    attention = functional.scaled_dot_product_attention
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    try:
        yield
    except BaseException:
        functional.scaled_dot_product_attention = attention
        dispatcher._custom_op_handlers = handlers
        raise


@contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Drop the functions that a block of context parallelism has put in place of attention: torch keeps one a block, and its mesh."""
    functions: dict[Any, Any] = ring_attention()._replaced_functions
    before = set(functions)
    try:
        yield
    finally:
        for function in functions.keys() - before:
            del functions[function]
