"""What somebody may have meant who wrote a name that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

# what others call the same, too far from our word to be taken for a slip
OTHER_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "no",
    "fp32": "no",
    "none": "no",
    "float8": "fp8",
}
UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'$")


def closest(word: str, known: Iterable[str]) -> str | None:
    """The name that a word may stand for, whatever its case.

    Args:
        word: What was written.
        known: The names there are.

    Returns:
        One of `known`; None when none of them is close.
    """
    import difflib  # which nobody waits for who writes what exists

    by_lower_case = {name.lower(): name for name in known}
    other = OTHER_NAMES.get(word.lower(), "")
    if other in by_lower_case:
        return by_lower_case[other]
    found = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
    return by_lower_case[found[0]] if found else None


def guess_arguments(cls: C) -> C:
    """Decorate a class so that a misspelt argument of its constructor is answered with the one that was meant.

    Args:
        cls: A class with an `__init__` of its own, such as a dataclass. Its signature stays what it is.

    Returns:
        The class itself.
    """
    init: Any = cls.__init__  # type: ignore[misc]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            wrong = UNEXPECTED.search(str(error))
            inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if wrong is None or inside:  # the body of the constructor called something else
                raise
            import inspect

            guess = closest(wrong[1], [name for name in inspect.signature(init).parameters if name != "self"])
            if guess is None:
                raise
            raise TypeError(f"{error}. Did you mean {guess!r}?") from None

    cls.__init__ = checked  # type: ignore[misc]
    return cls
