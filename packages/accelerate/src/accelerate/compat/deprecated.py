"""Deprecated methods and keywords of `Accelerator`: they work, with a warning that names the replacement."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from accel_state.settings.data import DataLoaderConfiguration
from accel_state.warning import warn_user

A = TypeVar("A")
Keywords = dict[str, Any]


def accept_old_names(cls: type[A]) -> type[A]:
    """Add deprecated aliases to a class of accelerators: a decorator.

    Args:
        cls: `Accelerator`.

    Returns:
        The class, with the methods `set_breakpoint`, `check_breakpoint` and `load_checkpoint`, and with deprecated keywords
        of its constructor and of `on_local_process`. Signatures do not change.
    """
    accelerator_class: Any = cls
    for old, new in RENAMED_METHODS.items():
        setattr(cls, old, _renamed(old, new))
    accelerator_class.__init__ = _translating(accelerator_class.__init__, CONSTRUCTOR)
    accelerator_class.on_local_process = _translating(
        accelerator_class.on_local_process, {"local_process_idx": _rename("local_process_index")}
    )
    return cls


RENAMED_METHODS = {
    "set_breakpoint": "set_trigger",
    "check_breakpoint": "check_trigger",
    "load_checkpoint": "load_state",
}


def _renamed(old: str, new: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        warn_user(f"{old}() is deprecated. Call {new}().", FutureWarning)
        return getattr(self, new)(*args, **kwargs)

    method.__name__ = method.__qualname__ = old
    method.__doc__ = f"Deprecated: `{new}`, which takes the same arguments."
    return method


def _translating(function: Callable[..., Any], old: dict[str, Callable[[str, Any, Keywords], str]]) -> Any:
    """Wrap a function: deprecated keywords are translated before it is called."""

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() & old.keys():
            advice = old[name](name, kwargs.pop(name), kwargs)
            warn_user(f"{name}= is deprecated: {advice}.", FutureWarning)
        return function(*args, **kwargs)

    return translated


def _rename(new: str) -> Callable[[str, Any, Keywords], str]:
    def translate(old: str, value: Any, kwargs: Keywords) -> str:
        if new in kwargs:
            raise TypeError(
                f"{old} and {new} are both passed, but {old} is a deprecated alias of {new}. Pass only {new}."
            )
        kwargs[new] = value
        return f"write {new}="

    return translate


def _put_into_loader_settings(old: str, value: Any, kwargs: Keywords) -> str:
    settings = kwargs.get("dataloader_config") or DataLoaderConfiguration()
    kwargs["dataloader_config"] = replace(settings, **{old: value})
    return f"pass dataloader_config=DataLoaderConfiguration({old}={value!r})"


def _set_downcast(old: str, value: Any, kwargs: Keywords) -> str:
    os.environ.pop("ACCELERATE_DOWNCAST_BF16", None)
    if value:
        os.environ["ACCELERATE_DOWNCAST_BF16"] = "true"
    return "launch with --downcast_bf16, or set ACCELERATE_DOWNCAST_BF16"


CONSTRUCTOR = {
    "kwarg_handler": _rename("kwargs_handlers"),
    "kwarg_handlers": _rename("kwargs_handlers"),
    "even_batches": _put_into_loader_settings,
    "downcast_bf16": _set_downcast,
}
