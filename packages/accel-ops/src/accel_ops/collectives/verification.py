"""Debug mode: all ranks compare the shapes of a collective's tensors before it can hang."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from accel_ops.collectives.announcing import describe
from accel_state.errors import DistributedOperationException
from accel_state.processes import PartialState

P = ParamSpec("P")
R = TypeVar("R")


def verify_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective so that in debug mode it raises an error if shapes differ between processes.

    The tensors are the first argument, or the keyword `tensor`. Debug mode is on with `ACCELERATE_DEBUG_MODE=1`.

    Raises:
        DistributedOperationException: On all processes, naming the operation and the shapes of every process.
    """

    @wraps(function)
    def verified(*args: P.args, **kwargs: P.kwargs) -> R:
        state = PartialState()
        if not state.debug or state.num_processes == 1:
            return function(*args, **kwargs)
        operation = f"{function.__module__}.{function.__name__}"
        _compare(kwargs["tensor"] if "tensor" in kwargs else args[0], operation, state)
        return function(*args, **kwargs)

    return verified


def _compare(data: Any, operation: str, state: PartialState) -> None:
    import torch.distributed as dist

    descriptions: list[Any] = [None] * state.num_processes
    dist.all_gather_object(descriptions, describe(data))
    if len(set(descriptions)) > 1:
        listed = "\n".join(f"  - Process {rank}: {text}" for rank, text in enumerate(descriptions))
        raise DistributedOperationException(
            f"`{operation}` needs tensors of the same shapes on every process, but got:\n{listed}\n"
            "Pad them to one shape first, for instance with pad_across_processes."
        )


def chained_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that calls collectives, so that their errors name this function too."""

    @wraps(function)
    def chained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            operation = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"`{operation}` failed: {error}") from error

    return chained
