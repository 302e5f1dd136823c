"""Keyword arguments for objects that the library creates (autocast, gradient scaler, process group), by kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.handler import KwargsHandler as KwargsHandler
from accel_state.settings.option import (
    BOOLEAN,
    TEXT,
    Kind,
    above,
    at_least,
    is_number,
    option,
    resolve_options,
)

if TYPE_CHECKING:
    from accel_state.settings.ddp import DistributedDataParallelKwargs
    from accel_state.settings.finite_gradients import FiniteGradientsKwargs
    from accel_state.settings.fp8 import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
    from accel_state.settings.profile import ProfileKwargs

NCCL_TIMEOUT = timedelta(minutes=10)
OTHER_TIMEOUT = timedelta(minutes=30)


@known_as("accelerate.utils.dataclasses.AutocastKwargs")
@guess_arguments
@dataclass
class AutocastKwargs(KwargsHandler):
    """How `torch.autocast` behaves under mixed precision.

    Args:
        enabled (`bool`): False switches autocast off in the regions it is used for.
        cache_enabled (`bool`, *optional*): Whether casts of weights are cached in the region; torch's default when None.

    Example:
        ```python
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            loss = criterion(outputs.float(), targets)
        ```
    """

    slot = "autocast"

    enabled: bool = option(True, kind=BOOLEAN)
    cache_enabled: bool | None = option(None, kind=BOOLEAN)

    def __post_init__(self) -> None:
        resolve_options(self)


@known_as("accelerate.utils.dataclasses.GradScalerKwargs")
@guess_arguments
@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the loss is scaled under fp16, see `torch.amp.GradScaler`.

    Args:
        init_scale (`float`): The initial loss scale.
        growth_factor (`float`): Multiplies the scale after `growth_interval` steps without infinities; above 1.
        backoff_factor (`float`): Multiplies the scale after a step with infinities; between 0 and 1.
        growth_interval (`int`): Number of consecutive steps without infinities after which the scale grows.
        enabled (`bool`): False disables loss scaling.
    """

    slot = "grad_scaler"

    init_scale: float = option(65536.0, kind=above(0))
    growth_factor: float = option(2.0, kind=above(1))
    backoff_factor: float = option(0.5, kind=above(0, below=1))
    growth_interval: int = option(2000, kind=at_least(1))
    enabled: bool = option(True, kind=BOOLEAN)

    def __post_init__(self) -> None:
        resolve_options(self)


def _no_timeout(text: str) -> timedelta:
    raise ValueError(text)


def _as_duration(value: Any) -> Any:
    return timedelta(seconds=float(value)) if is_number(value) else value


DURATION = Kind(
    "a datetime.timedelta above zero, for example timedelta(seconds=1800), or seconds",
    _no_timeout,
    lambda value: isinstance(value, timedelta) and value > timedelta(0),
    convert=_as_duration,
)


@known_as("accelerate.utils.dataclasses.InitProcessGroupKwargs")
@guess_arguments
@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group starts, see `torch.distributed.init_process_group`.

    Args:
        backend (`str`, *optional*): The collective library. `"nccl"`, the default, and None leave the choice to the
            device; any other name is used as it is.
        init_method (`str`, *optional*): URL of the rendezvous.
        timeout (`datetime.timedelta`, *optional*): How long a collective may take, also in seconds. 10 minutes for
            nccl, 30 for the other backends.
    """

    slot = "process_group"
    _leaves_timeout = True

    backend: str | None = "nccl"
    init_method: str | None = option(None, kind=TEXT)
    timeout: timedelta | None = option(None, kind=DURATION)

    def __post_init__(self) -> None:
        if self.backend is not None:  # None is a choice of its own here, not "not given"
            TEXT.read("InitProcessGroupKwargs.backend", self.backend)
        self._leaves_timeout = self.timeout is None
        if self.timeout is None:
            self.timeout = NCCL_TIMEOUT if self.backend == "nccl" else OTHER_TIMEOUT
        resolve_options(self)

    @override
    def to_dict(self) -> dict[str, Any]:
        """All values by field name."""
        return {name: value for name, value in super().to_dict().items() if name != "_leaves_timeout"}

    @override
    def to_kwargs(self) -> dict[str, Any]:
        """As for every handler; a timeout that was given is in force, also if it is another backend's default."""
        return super().to_kwargs() | ({} if self._leaves_timeout else {"timeout": self.timeout})


SLOT_CLASSES = {
    "ddp": "DistributedDataParallelKwargs",
    "grad_scaler": "GradScalerKwargs",
    "process_group": "InitProcessGroupKwargs",
    "autocast": "AutocastKwargs",
    "profile": "ProfileKwargs",
    "finite_gradients": "FiniteGradientsKwargs",
    "fp8": "AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs or FP8RecipeKwargs",
}


@dataclass(slots=True)
class Handlers:
    """The handlers of an accelerator, at most one of each kind; None where none was given."""

    ddp: DistributedDataParallelKwargs | None = None
    grad_scaler: GradScalerKwargs | None = None
    process_group: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | None = None
    finite_gradients: FiniteGradientsKwargs | None = None

    @classmethod
    def sort(cls, given: Iterable[KwargsHandler] | None) -> Handlers:
        """Assign each handler of a list to its field.

        Args:
            given: The user's `kwargs_handlers`.

        Raises:
            ValueError: When an item is not a handler, or two are of one kind.
        """
        handlers = cls()
        for position, handler in enumerate(given or ()):
            slot = handler.slot if isinstance(handler, KwargsHandler) else None
            if slot is None:
                raise ValueError(
                    f"kwargs_handlers[{position}]={handler!r} does not belong in this list: it takes objects (not "
                    f"classes) of {', '.join(SLOT_CLASSES.values())}. Everything else has an argument of its own."
                )
            present = getattr(handlers, slot)
            if present is not None:
                raise ValueError(
                    f"kwargs_handlers holds {present!r} and {handler!r}, of which only one can be used: pass at most "
                    f"one {SLOT_CLASSES[slot]}."
                )
            setattr(handlers, slot, handler)
        return handlers
