"""Comparing example programs: does the complete one have what those of single features have?"""

from __future__ import annotations

import os
from collections.abc import Sequence

FUNCTIONS = ("training_function", "main")


def get_function_contents_by_name(lines: Sequence[str], name: str) -> list[str]:
    """The lines of one function of a program.

    Args:
        lines: The lines of the program.
        name: `"training_function"` or `"main"`.

    Returns:
        The lines from `def` to the last one of its body; empty when there is no such function.

    Raises:
        ValueError: For another name.
    """
    if name not in FUNCTIONS:
        raise ValueError(
            f"name={name!r} is not a function of an example. Use one of {', '.join(map(repr, FUNCTIONS))}."
        )
    begin = next((index for index, line in enumerate(lines) if line.startswith(f"def {name}(")), None)
    if begin is None:
        return []
    body = range(begin + 1, len(lines))
    end = next((index for index in body if lines[index][:1].strip() and lines[index][0] not in ")]}"), len(lines))
    return list(lines[begin:end])


def clean_lines(lines: Sequence[str]) -> list[str]:
    """The lines that do something: without comments and empty ones.

    Args:
        lines: The lines of a program.
    """
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def compare_against_test(
    base_filename: str | os.PathLike[str],
    feature_filename: str | os.PathLike[str],
    parser_only: bool,
    secondary_filename: str | os.PathLike[str] | None = None,
) -> list[str]:
    """The lines of a program for one feature that the complete program lacks.

    Args:
        base_filename: The complete program.
        feature_filename: The program for one feature.
        parser_only (`bool`): Compare `main`, where arguments are read, rather than `training_function`.
        secondary_filename: A further program whose lines are not missed.

    Returns:
        The missing lines, in their order, with their indentation.
    """
    name = "main" if parser_only else "training_function"
    base_lines = {line.strip() for path in (base_filename, secondary_filename) if path for line in _lines(path, name)}
    return [line for line in _lines(feature_filename, name) if line.strip() not in base_lines]


def _lines(path: str | os.PathLike[str], name: str) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return clean_lines(get_function_contents_by_name(file.readlines(), name))
