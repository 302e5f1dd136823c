"""One name for a class in every pickle: the one that accelerate 1.15 gave it.

`torch.save` and `pickle` write a class as the module and the name it calls its own. A program that imports
`accelerate.PartialState` expects to find "accelerate.state.PartialState" there, and so does every machine that has
accelerate 1.15 and none of the `accel_*` packages. Without the umbrella that name leads nowhere; so classes keep the
place where they are written until the umbrella is imported.
"""

from collections.abc import Callable
from typing import ForwardRef, TypeVar

C = TypeVar("C", bound=type)

_umbrella_imported = False
_known_as: list[tuple[type, str]] = []  # the classes met so far; those of modules not yet imported follow


def known_as(public_name: str) -> Callable[[C], C]:
    """Give a class its public name, from the moment the umbrella is imported.

    Args:
        public_name: Where programs written for accelerate 1.15 import the class, "accelerate.state.PartialState".

    Returns:
        The decorator; it returns the class itself.

    Example:
        ```python
        @known_as("accelerate.state.PartialState")
        class PartialState: ...
        ```
    """

    def name(cls: C) -> C:
        _known_as.append((cls, public_name))
        if _umbrella_imported:
            _rename(cls, public_name)
        return cls

    return name


def use_public_names() -> None:
    """Let every class take its public name, now or when its module is imported. The umbrella calls this."""
    global _umbrella_imported
    _umbrella_imported = True
    for cls, public_name in _known_as:
        _rename(cls, public_name)


def _rename(cls: type, public_name: str) -> None:
    written_in = cls.__module__
    own_hints = cls.__dict__.get("__annotations__", {})
    for name, hint in own_hints.items():
        if isinstance(hint, str):  # still means what it means where it is written
            own_hints[name] = ForwardRef(hint, is_argument=False, module=written_in, is_class=True)
    cls.__module__, _, cls.__qualname__ = public_name.rpartition(".")
