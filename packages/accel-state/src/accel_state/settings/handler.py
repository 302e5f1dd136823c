"""The base class of dataclasses that hold keyword arguments for an object built elsewhere."""

from __future__ import annotations

from copy import copy
from typing import Any, ClassVar

from accel_state.public_names import known_as
from accel_state.settings.option import making_defaults


@known_as("accelerate.utils.dataclasses.KwargsHandler")
class KwargsHandler:
    """Base of dataclasses that hold keyword arguments for an object built elsewhere, such as a `GradScaler`."""

    slot: ClassVar[str | None] = None
    """The field of `Handlers` that holds it; None for handlers that `Accelerator` takes in an argument of their own."""

    def to_dict(self) -> dict[str, Any]:
        """All values by field name; lists and dictionaries are copies."""
        return {name: copy(value) if isinstance(value, (dict, list)) else value for name, value in vars(self).items()}

    def to_kwargs(self) -> dict[str, Any]:
        """The values that differ from the defaults which hold when no environment variable is set."""
        with making_defaults():
            defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}
