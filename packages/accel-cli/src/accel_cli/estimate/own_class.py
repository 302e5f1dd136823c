"""Models of a class of the user's own, named as `module:Class` or `file.py:Class`."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_cli.errors import MissingFileError, UsageError, did_you_mean
from accel_cli.estimate.source import ModelSource

if TYPE_CHECKING:
    from torch import nn

LIBRARY = "python"
NAME = re.compile(r"(?P<place>.+\.py|[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_]\w*)")


def is_class_name(name: str) -> bool:
    """Whether a model's name is that of a class, such as `nets.py:Net`, or of a function that makes the model."""
    return NAME.fullmatch(name) is not None


def find_class(name: str, arguments: str | None) -> ModelSource:
    """Find the file or module of a class, and import nothing yet.

    Args:
        name: As `file.py:Class` or `module:Class`.
        arguments: A JSON object with the keyword arguments of the class.

    Raises:
        UsageError: There is no such file, or the arguments are no JSON object.
    """
    place = name.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        raise MissingFileError(f"The file {place!r} does not exist. Check the path.")
    try:
        values = json.loads(arguments or "{}")
    except ValueError as error:
        raise UsageError(f"--arguments is not valid JSON ({error}), got {arguments!r}.") from None
    if not isinstance(values, dict):
        raise UsageError(f"--arguments must be a JSON object, such as '{{\"width\": 64}}', got {arguments!r}.")
    return ModelSource(name, None, LIBRARY, values)


def build_class(source: ModelSource) -> nn.Module:
    """Import the class, and make a model of it. It is the user's own code, on this machine.

    Raises:
        UsageError: There is no such class, it fails, or makes no model.
    """
    from torch import nn

    match = NAME.fullmatch(source.name)
    assert match is not None
    place, attribute = match["place"], match["attribute"]
    values = _names_of(place)
    if attribute not in values:
        raise UsageError(f"{place} has no {attribute!r}.{did_you_mean(attribute, list(values))}")
    model: Any = values[attribute]
    try:
        model = model(**source.config)
    except Exception as error:
        raise UsageError(
            f"{source.name} cannot be made with {source.config or 'no arguments'} ({type(error).__name__}: {error}). Give --arguments "
            "as a JSON object, such as '{\"width\": 64}'."
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{source.name} made a {type(model).__name__}, which is not a torch.nn.Module. Name a model.")
    return model


def _names_of(place: str) -> dict[str, Any]:
    """The names that a file or module defines."""
    is_file = place.endswith(".py")
    sys.path.insert(0, str(Path(place).parent if is_file else Path.cwd()))  # as Python does for a script
    try:
        return runpy.run_path(place, run_name="model") if is_file else vars(import_module(place))
    except ImportError as error:
        raise UsageError(f"{place} cannot be imported ({error}). Run the command where `import` finds it.") from error
    finally:
        sys.path.pop(0)
