"""Environment variables: reading them with a type, setting them for a while, and restoring them."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from accel_state.nvidia import check_cuda_fp8_capability as check_cuda_fp8_capability
from accel_state.nvidia import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accel_state.nvidia import get_driver_version as get_driver_version
from accel_state.nvidia import get_gpu_info as get_gpu_info
from accel_state.public_names import known_as

logger = logging.getLogger("accelerate.utils.environment")

OWN_PREFIX = "ACCELERATE_"
TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})
SHELL_UNSAFE = frozenset(";\n<>| ")

Purged = TypeVar("Purged", bound=Callable[..., Any])


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a bool written as a str.

    Args:
        value: One of y, yes, t, true, on, 1 or n, no, f, false, off, 0, in any case.
        to_bool: Return `True`/`False` rather than `1`/`0`.

    Raises:
        ValueError: For any other str.
    """
    word = value.lower()
    if word in TRUE_WORDS:
        return True if to_bool else 1
    if word in FALSE_WORDS:
        return False if to_bool else 0
    raise ValueError(
        f"{value!r} is not a bool: use one of {', '.join(sorted(TRUE_WORDS))} or {', '.join(sorted(FALSE_WORDS))}."
    )


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Read the environment variable `key` as a bool; `default` when it is not set.

    Raises:
        ValueError: When it is set to something that is not a bool.
    """
    text = os.environ.get(key)
    if text is None:
        return default
    try:
        return bool(str_to_bool(text))
    except ValueError as error:
        raise ValueError(f"Environment variable {key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Read the environment variable `key` as a str; `default` when it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Read the first of several environment variables that holds an integer of zero or more.

    Args:
        env_keys: Names of variables, the preferred one first.
        default: Returned when none of them is set (or all are negative).

    Raises:
        ValueError: When a variable is set to something that is not an integer.
    """
    for key in env_keys:
        text = os.environ.get(key)
        if text is None:
            continue
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"Environment variable {key} is {text!r}: set an integer, or unset it.") from None
        if number >= 0:
            return number
    return default


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the named libraries that this process has imported already."""
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    r"""Write variables as the lines of a `.deepspeed_env` file, leaving out what a shell could misread.

    Args:
        current_env: Names and values.

    Returns:
        One `"NAME=value\n"` line per variable kept.
    """
    lines = []
    for name, value in current_env.items():
        if name and value and SHELL_UNSAFE.isdisjoint(name + value):
            lines.append(f"{name}={value}\n")
        else:
            logger.warning(
                "Ignored environment variable %r with value %r: names and values must not be empty or contain blanks, line "
                "breaks or any of ; < > |",
                name,
                value,
            )
    return lines


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables for the length of a `with` block; names are upper-cased, values converted to str.

    Example:
        ```python
        with patch_environment(accelerate_use_cpu=True):
            ...  # ACCELERATE_USE_CPU is "True" here
        ```
    """
    wanted = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment for the length of a `with` block; it is restored afterwards, without what was set inside."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _own_variables_kept() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith(OWN_PREFIX)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(OWN_PREFIX)]:
            del os.environ[name]
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: Purged) -> Purged:
    """Decorator that undoes every change of `ACCELERATE_*` variables made by a function or by a class's tests.

    Args:
        func_or_cls: A function (plain, async, generator or async generator), or a class. Of a class, and of those
            derived from it, the methods named `test...` are treated; what `setUp` sets is therefore visible in them.

    Returns:
        A function that behaves as the given one, or the class itself, changed in place.
    """
    if isinstance(func_or_cls, type):
        return _purge_class(func_or_cls)  # type: ignore[return-value]
    return _purge_function(func_or_cls)


def _purge_class(cls: type) -> type:
    _purge_tests(cls)
    own_hook = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: type, **kwargs: Any) -> None:
        hook = own_hook.__get__(None, subclass) if own_hook else super(cls, subclass).__init_subclass__  # type: ignore[arg-type]
        hook(**kwargs)
        _purge_tests(subclass)

    cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    return cls


def _purge_tests(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, (staticmethod, classmethod)):
            setattr(cls, name, type(member)(_purge_function(member.__func__)))
        elif inspect.isfunction(member):
            setattr(cls, name, _purge_function(member))


def _purge_function(function: Any) -> Any:
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def purged_async_generator(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            with _own_variables_kept():
                async for item in function(*args, **kwargs):
                    yield item

        return purged_async_generator
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def purged_coroutine(*args: Any, **kwargs: Any) -> Any:
            with _own_variables_kept():
                return await function(*args, **kwargs)

        return purged_coroutine
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def purged_generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with _own_variables_kept():
                return (yield from function(*args, **kwargs))

        return purged_generator

    @functools.wraps(function)
    def purged(*args: Any, **kwargs: Any) -> Any:
        with _own_variables_kept():
            return function(*args, **kwargs)

    return purged


@known_as("accelerate.utils.environment.CPUInformation")
@dataclass
class CPUInformation:
    """Rank and world size of a CPU process, globally and on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Rank and world size of this process as set by torchrun, an MPI launcher or SLURM; one process without any of them."""
    from accel_state.clusters import check_alone, detect_cluster

    rank_info = detect_cluster(os.environ)
    if rank_info is None:
        check_alone(os.environ)
        return CPUInformation()
    return CPUInformation(rank_info.rank, rank_info.world_size, rank_info.local_rank, rank_info.local_world_size)
