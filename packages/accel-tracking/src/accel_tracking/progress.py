"""A progress bar that shows once a machine."""

from __future__ import annotations

from typing import Any

from accel_state.errors import missing_library
from accel_state.libraries import is_tqdm_available
from accel_state.processes import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by the first process of each machine.

    Args:
        args: For `tqdm`, the iterable first.
        main_process_only (`bool`): False shows a bar in every process.
        kwargs: For `tqdm`.

    Returns:
        The bar, to iterate over or to update.

    Raises:
        ValueError: When the first argument is a bool, as an old spelling of `main_process_only` was.
        ImportError: When tqdm is not installed.

    Example:
        ```python
        for batch in tqdm(loader, desc="epoch 1"):
            ...
        ```
    """
    if not is_tqdm_available():
        raise missing_library("tqdm", why="The progress bar")
    if args and isinstance(args[0], bool):
        raise ValueError(f"tqdm({args[0]!r}, ...): pass what to iterate over first, and main_process_only by keyword.")
    from tqdm.auto import tqdm as bar

    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = PartialState().local_process_index != 0
    return bar(*args, **kwargs)
