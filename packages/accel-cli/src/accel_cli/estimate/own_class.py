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
NAME = re.compile(r"(?P<origin>.+\.py|[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_]\w*)")


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
    origin = name.rpartition(":")[0]
    if origin.endswith(".py") and not Path(origin).is_file():
        raise MissingFileError(f"The file {origin!r} does not exist. Check the path.")
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
    origin, attribute = match["origin"], match["attribute"]
    values = _names_of(origin)
    if attribute not in values:
        raise UsageError(f"{origin} has no {attribute!r}.{did_you_mean(attribute, list(values))}")
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


def _names_of(origin: str) -> dict[str, Any]:
    """The names that a file or module defines."""
    is_file = origin.endswith(".py")
    sys.path.insert(0, str(Path(origin).parent if is_file else Path.cwd()))  # as Python does for a script
    try:
        return runpy.run_path(origin, run_name="model") if is_file else vars(import_module(origin))
    except ImportError as error:
        raise UsageError(f"{origin} cannot be imported ({error}). Run the command where `import` finds it.") from error
    finally:
        sys.path.pop(0)
