"""Settings of `torch.compile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from accel_state.enums import DynamoBackend
from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.handlers import KwargsHandler
from accel_state.settings.option import BOOLEAN, Kind, member_of, option, resolve_options, suggested

MISSPELT_BACKENDS = {"torhchxla_trace_once": "torchxla_trace_once"}  # accelerate 1.15 accepts only the wrong spelling
_MEMBERS = member_of(DynamoBackend)


def _canonical(word: str) -> str:
    return MISSPELT_BACKENDS.get(word.lower(), word).upper()


BACKEND = Kind(
    _MEMBERS.expected,
    lambda text: _MEMBERS.parse(_canonical(text)),
    _MEMBERS.accepts,
    (*(word.lower() for word in _MEMBERS.choices), *MISSPELT_BACKENDS),
    closed=True,
    exact=True,
    metavar="BACKEND",
    canonical=_canonical,
)
MODE = suggested("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", exact=True)


@known_as("accelerate.utils.dataclasses.TorchDynamoPlugin")
@guess_arguments
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile`, and whether a model is compiled as one graph or by its repeated blocks.

    Args:
        backend (`DynamoBackend` or `str`): The compiler, `DynamoBackend.NO` for none.
        mode (`str`): What inductor optimises for.
        fullgraph (`bool`): Raise an error on a graph break.
        dynamic (`bool`, *optional*): Compile for varying shapes; torch finds out by itself when None.
        options: Passed on to the backend; excludes `mode`.
        disable (`bool`): Make `torch.compile` do nothing.
        use_regional_compilation (`bool`): Compile each repeated block once instead of the whole model.

    Example:
        ```python
        accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True))
        ```
    """

    backend: DynamoBackend = option(
        None,
        kind=BACKEND,
        env="ACCELERATE_DYNAMO_BACKEND",
        flag="--dynamo_backend",
        help="Backend of torch.compile; `no` does not compile.",
        fallback=DynamoBackend.NO,
        launch_default=None,
    )
    mode: str = option(
        None,
        kind=MODE,
        env="ACCELERATE_DYNAMO_MODE",
        flag="--dynamo_mode",
        help="What torch.compile optimizes for.",
        fallback="default",
    )
    fullgraph: bool = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        flag="--dynamo_use_fullgraph",
        help="Fail rather than split the model into several graphs.",
        fallback=False,
        switch=True,
    )
    dynamic: bool | None = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_DYNAMO_USE_DYNAMIC",
        flag="--dynamo_use_dynamic",
        help="Compile for shapes that change.",
        switch=True,
    )
    options: Any = None
    disable: bool = option(False, kind=BOOLEAN)
    use_regional_compilation: bool = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        flag="--dynamo_use_regional_compilation",
        help="Compile each repeated block once instead of the whole model.",
        fallback=False,
        switch=True,
    )

    def __post_init__(self) -> None:
        resolve_options(self)

    @override
    def to_dict(self) -> dict[str, Any]:
        """All values by field name, with the backend's name as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    @override
    def to_kwargs(self) -> dict[str, Any]:
        """The keyword arguments for `torch.compile` that differ from the defaults."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}
