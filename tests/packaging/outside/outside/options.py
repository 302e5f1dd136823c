"""An option: one field."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.settings.option import at_least, option, resolve_options


@dataclass
class ToyOptions:
    """What the toy is asked for."""

    speed: int = option(None, kind=at_least(1), env="TOY_SPEED", flag="--toy_speed", help="How fast.", fallback=3)

    def __post_init__(self) -> None:
        resolve_options(self)
