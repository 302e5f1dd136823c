"""Memory: releasing it, and finding a batch size that fits into it."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from accel_ops.collectives.store_exchange import exchange_outcomes, note_outcome
from accel_state.devices import detect_device_kind
from accel_state.processes import PartialState

logger = logging.getLogger("accelerate.utils.memory")  # works before the process state is initialized

OUT_OF_MEMORY_MESSAGES = (
    "out of memory",  # any device's allocator, among them XPU's and CUDA's
    "CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # raised by cuDNN when it cannot allocate its workspace
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",  # Gaudi
)
FINISHED, OUT_OF_MEMORY, RAISED = "finished", "out of memory", "another error"


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release unused memory of torch's caching allocator to the device's driver.

    Args:
        garbage_collection (`bool`): Collect unreachable objects first.
    """
    if garbage_collection:
        gc.collect()
    detect_device_kind().empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release objects and their memory.

    Args:
        objects: The objects; the caller must assign the result to the same names.

    Returns:
        One None for each object.

    Example:
        ```python
        model, optimizer = release_memory(model, optimizer)
        ```
    """
    released: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error is an out-of-memory error."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    return any(message in str(exception.args[0]) for message in OUT_OF_MEMORY_MESSAGES)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function of a batch size so that it is called with smaller and smaller ones until memory suffices.

    With several processes all try the same sizes: when memory runs out on one, all try the next. Therefore all
    processes must call the function. They exchange how an attempt ended through the store of the process group,
    which mixes with no collective of the function.

    It cannot be promised that a run goes on where memory runs out on some ranks in the middle of a step: the others then
    wait in a collective, such as the all-reduce of gradients, which those ranks never enter. Once the timeout of the
    process group has passed, this is an error on all of them. Batches of equal sizes on all ranks avoid it.

    Args:
        function: Takes the batch size as its first argument, which callers leave out.
        starting_batch_size (`int`): The first to try. A later call begins with the one that was found.
        reduce_batch_size_fn (*optional*): Returns the next to try; nine tenths of the last one when None.

    Returns:
        The decorated function.

    Raises:
        TypeError: From the decorated function, when the batch size was passed, or none can be taken.
        RuntimeError: From the decorated function, when the size has reached zero, and where another process raised an
            error or did not finish its attempt within the timeout of the process group.

    Example:
        ```python
        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size, model):
            ...

        train(model)
        ```
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    batch_size = starting_batch_size
    next_size = reduce_batch_size_fn or (lambda: int(batch_size * 0.9))

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        if batch_size <= 0:  # none was found by the call before
            batch_size = starting_batch_size
        _check_arguments(function, args)
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            result, failure = _attempt(function, batch_size, args, kwargs)
            if not _ran_out_anywhere(OUT_OF_MEMORY if failure is not None else FINISHED):
                return result
            del result
            clear_device_cache(garbage_collection=True)
            previous, batch_size = batch_size, next_size()
            logger.info("Memory ran out with a batch size of %d, trying %d", previous, batch_size)
        raise RuntimeError(
            f"No executable batch size found for {function.__name__}: started at {starting_batch_size} and reached "
            "zero. Use a smaller model, or more memory."
        )

    return search


def _attempt(
    function: Callable[..., Any], batch_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
    """Call the function; when memory runs out, return the message without the traceback, which would hold memory."""
    try:
        return function(batch_size, *args, **kwargs), None
    except Exception as error:
        if should_reduce_batch_size(error):
            return None, str(error)
        if _is_distributed():
            note_outcome(RAISED)
        raise


def _ran_out_anywhere(outcome: str) -> bool:
    """Whether memory ran out on any process; the same result on all.

    Raises:
        RuntimeError: Another process raised an error, or has not finished in time.
    """
    if not _is_distributed():
        return outcome == OUT_OF_MEMORY
    outcomes = exchange_outcomes(outcome)
    if RAISED in outcomes:
        raise RuntimeError(
            f"Rank {outcomes.index(RAISED)} raised an error, so no batch size was found. See the error of that rank."
        )
    return OUT_OF_MEMORY in outcomes


def _is_distributed() -> bool:
    return bool(PartialState._shared_state) and PartialState().num_processes > 1


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    names = list(inspect.signature(function).parameters)
    if len(names) < len(args) + 1:
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(names[1:], args[1:], strict=False))
        raise TypeError(
            f"{function.__name__}() is called with a batch size as its first argument by find_executable_batch_size: "
            f"leave it out of the call, as in `{function.__name__}({shown})`."
        )


def get_xpu_available_memory(device_index: int) -> int:
    """Free memory of an Intel GPU in bytes."""
    memory_info = getattr(torch.xpu, "mem_get_info", None)
    if memory_info is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot report the free memory of XPU {device_index}: update torch."
        )
    return int(memory_info(device_index)[0])


def convert_bytes(size: float) -> str:
    """A number of bytes as a readable str, such as `"1.25 GB"`."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"
