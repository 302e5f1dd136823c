"""Importing megatron-core, with one error where it is missing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from accel_state.errors import missing_library


def check_installed() -> None:
    """Check that megatron-core is installed, without importing it, which takes seconds.

    Raises:
        MissingLibraryError: It is not.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise missing_library("megatron-core", why="MegatronLMPlugin")


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which warnings that are megatron-core's business are not shown.

    Its own are about its defaults and about GPUs, torch's about collectives that it calls by their old names.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
        yield


@cache
def load(module: str) -> Any:
    """Import a module of megatron-core once, whose remarks about other libraries that are absent are not shown.

    Args:
        module: Its name below `megatron.core`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"megatron.core.{module}")
