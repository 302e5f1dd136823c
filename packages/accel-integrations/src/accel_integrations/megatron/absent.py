"""What is said when something needs the part of Megatron-LM that no package index has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def needs_megatron(what: str) -> NotImplementedError:
    """The error for something that only the engine for Megatron-LM can do.

    Args:
        what: What was asked for, as the beginning of a sentence.

    Returns:
        The error, for the caller to raise.
    """
    return NotImplementedError(
        f"{what} needs the engine for Megatron-LM, which is not part of this release, as its package megatron.training is "
        "on no package index: use ParallelismConfig for tensor, pipeline, context and sharded data parallelism."
    )


def function_that_needs_megatron(what: str) -> Callable[..., Any]:
    """A function that raises that error when it is called.

    Args:
        what: As for `needs_megatron`.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise needs_megatron(what)

    return refuse
