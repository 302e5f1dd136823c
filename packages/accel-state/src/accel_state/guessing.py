"""Suggestions for misspelt names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

# other names of the same values, too different to be found as misspellings
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
    """The known name that is closest to a word, whatever its case.

    Args:
        word: The unknown name.
        known: The existing names.

    Returns:
        One of `known`; None when none of them is close.
    """
    import difflib  # slow to import, and needed only after an error

    by_lower_case = {name.lower(): name for name in known}
    other = OTHER_NAMES.get(word.lower())
    if other in by_lower_case:
        return by_lower_case[other]
    nearest = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
    return by_lower_case[nearest[0]] if nearest else None


def guess_arguments(cls: C) -> C:
    """Decorate a class so that the error about a misspelt constructor argument suggests the right one.

    Args:
        cls: A class with an `__init__` of its own, such as a dataclass. Its signature does not change.

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
