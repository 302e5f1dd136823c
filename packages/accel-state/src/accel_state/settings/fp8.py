"""FP8 recipes, one class per library: torchao, Transformer Engine and MS-AMP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from accel_state.environment import str_to_bool
from accel_state.errors import missing_library
from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.handler import KwargsHandler
from accel_state.settings.option import (
    BOOLEAN,
    FUNCTION,
    Kind,
    as_bool,
    at_least,
    is_making_defaults,
    one_of,
    option,
    options_of,
    resolve_options,
)
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]
OptLevel = Literal["O1", "O2"]
Backend = Literal["MSAMP", "TE"]

DIRECTIONS = ("FPROP", "DGRAD", "WGRAD")


def _parse_three(text: str) -> tuple[int, ...]:
    values = tuple(str_to_bool(word.strip()) for word in text.split(","))
    if len(values) not in (1, 3):
        raise ValueError(f"expected one or three values, got {text!r}")
    return values if len(values) == 3 else values * 3


# accelerate 1.15 writes these as 1 and 0 into the environment, which programs read
BIT = BOOLEAN._replace(parse=str_to_bool)
THREE_BITS = Kind(
    "one bool, or three (true or false) for forward, data gradient and weight gradient",
    _parse_three,
    lambda value: isinstance(value, (tuple, list)) and len(value) == 3 and all(isinstance(row, bool) for row in value),
    convert=lambda value: tuple(map(as_bool, value)) if isinstance(value, (tuple, list)) else value,
    metavar="F,D,W",
)


@known_as("accelerate.utils.dataclasses.AORecipeKwargs")
@guess_arguments
@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao converts linear layers to float8.

    Args:
        config (`torchao.float8.Float8LinearConfig`, *optional*): The full recipe; built from the two bools below when
            left out.
        module_filter_func (function, *optional*): Takes a module and its name, and returns whether it is
            converted. By default, all linear layers but the first and the last.
        pad_inner_dim (`bool`): Pad matrices whose sizes are not multiples of 16.
        enable_fsdp_float8_all_gather (`bool`): All-gather FSDP parameters in float8.

    Raises:
        MissingLibraryError: When torchao is not installed.
    """

    slot = "fp8"

    config: Float8LinearConfig | None = None
    module_filter_func: Callable[..., Any] | None = option(None, kind=FUNCTION)
    pad_inner_dim: bool | None = option(
        None,
        kind=BIT,
        env="ACCELERATE_FP8_PAD_INNER_DIM",
        flag="--fp8_pad_inner_dim",
        help="torchao: pad matrices to a multiple of 16.",
        fallback=True,
        launch_default="true",
    )
    enable_fsdp_float8_all_gather: bool | None = option(
        None,
        kind=BIT,
        env="ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
        flag="--fp8_enable_fsdp_float8_all_gather",
        help="torchao: all-gather FSDP parameters in float8.",
        fallback=True,
        launch_default="true",
    )

    def __post_init__(self) -> None:
        from accel_state.libraries import is_torchao_available

        if not is_torchao_available():
            raise missing_library("torchao", why="AORecipeKwargs")
        switches = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
        if self.config is not None:
            resolve_options(self, ("module_filter_func",))
            self._warn_of_ignored(switches)
            return
        resolve_options(self)
        from torchao.float8 import Float8LinearConfig

        self.config = Float8LinearConfig(**{name: getattr(self, name) for name in switches})

    @property
    def is_emulated(self) -> bool:
        """Whether 8-bit floats are emulated, which works on any device."""
        return bool(getattr(self.config, "emulate", False))

    def _warn_of_ignored(self, switches: tuple[str, ...]) -> None:
        ignored = [f"{name}={getattr(self, name)!r}" for name in switches if getattr(self, name) is not None]
        if ignored:
            warn_user(f"AORecipeKwargs: {' and '.join(ignored)} has no effect together with config. Set it in config.")


@known_as("accelerate.utils.dataclasses.TERecipeKwargs")
@guess_arguments
@dataclass
class TERecipeKwargs(KwargsHandler):
    """How Transformer Engine scales FP8 tensors; see its `DelayedScaling`.

    Args:
        use_autocast_during_eval (`bool`): Use FP8 in evaluation too.
        margin (`int`): Margin of the scaling factor, in powers of two above the largest value (amax).
        interval (`int`): Steps between updates of the scaling factor.
        fp8_format (`"HYBRID"`, `"E4M3"` or `"E5M2"`): HYBRID is E4M3 in the forward pass and E5M2 in the backward
            pass.
        amax_history_len (`int`): Length of the amax history, in steps.
        amax_compute_algo (`"max"` or `"most_recent"`): How the amax is computed from the history.
        override_linear_precision (three `bool`): Whether the forward pass, the data gradient and the weight gradient of
            linear layers stay in higher precision.
        use_mxfp8_block_scaling (`bool`): One scaling factor per block of 32 values (MXFP8); needs hardware support.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
    """

    slot = "fp8"

    use_autocast_during_eval: bool | None = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL",
        flag="--fp8_use_autocast_during_eval",
        help="Transformer Engine: FP8 in evaluation, too.",
        fallback=False,
        switch=True,
    )
    margin: int | None = option(
        None,
        kind=at_least(0),
        env="ACCELERATE_FP8_MARGIN",
        flag="--fp8_margin",
        help="Transformer Engine: margin of the scaling factor.",
        fallback=0,
    )
    interval: int | None = option(
        None,
        kind=at_least(1),
        env="ACCELERATE_FP8_INTERVAL",
        flag="--fp8_interval",
        help="Transformer Engine: steps between updates of the scaling factor.",
        fallback=1,
    )
    fp8_format: FP8Format = option(
        None,
        choices=("HYBRID", "E4M3", "E5M2"),
        env="ACCELERATE_FP8_FORMAT",
        flag="--fp8_format",
        help="Transformer Engine: FP8 format; HYBRID is E4M3 forward and E5M2 backward.",
        fallback="HYBRID",
    )
    amax_history_len: int | None = option(
        None,
        kind=at_least(1),
        env="ACCELERATE_FP8_AMAX_HISTORY_LEN",
        flag="--fp8_amax_history_len",
        help="Transformer Engine: length of the amax history.",
        fallback=1024,
    )
    amax_compute_algo: AmaxComputeAlgorithm = option(
        None,
        choices=("max", "most_recent"),
        env="ACCELERATE_FP8_AMAX_COMPUTE_ALGO",
        flag="--fp8_amax_compute_algo",
        help="Transformer Engine: how the amax is computed from the history.",
        fallback="most_recent",
    )
    override_linear_precision: tuple[bool, bool, bool] = option(
        None,
        kind=THREE_BITS,
        env=" ".join(f"ACCELERATE_FP8_OVERRIDE_{direction}" for direction in DIRECTIONS),
        flag="--fp8_override_linear_precision",
        help="Transformer Engine: which passes keep higher precision: forward, data gradient, weight gradient.",
        fallback=(False, False, False),
    )
    use_mxfp8_block_scaling: bool | None = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING",
        help="Transformer Engine: one scaling factor per block of 32 values (MXFP8).",
        fallback=False,
    )

    def __post_init__(self) -> None:
        self._require_library()
        resolve_options(self, options_of(TERecipeKwargs))

    def _require_library(self) -> None:
        from accel_state.libraries import is_transformer_engine_available

        if not is_transformer_engine_available():
            raise missing_library("transformer-engine", why=type(self).__name__)


@known_as("accelerate.utils.dataclasses.MSAMPRecipeKwargs")
@guess_arguments
@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """What MS-AMP keeps in FP8.

    Args:
        opt_level (`"O1"` or `"O2"`): O1: weights and gradients; O2: optimizer states too.
    """

    slot = "fp8"

    opt_level: OptLevel = option(
        None,
        kind=one_of("O1", "O2"),
        env="ACCELERATE_FP8_OPT_LEVEL",
        flag="--fp8_opt_level",
        help="MS-AMP: optimization level.",
        fallback="O2",
    )

    def __post_init__(self) -> None:
        resolve_options(self)


INSTEAD = {
    "TE": "Use TERecipeKwargs.",
    "MSAMP": "backend='MSAMP' asks for MS-AMP (MSAMPRecipeKwargs), which is no longer published: training with it is refused. Use "
    "AORecipeKwargs (torchao) or TERecipeKwargs (Transformer Engine).",
}


@known_as("accelerate.utils.dataclasses.FP8RecipeKwargs")
@guess_arguments
@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Deprecated: either of two recipes in one class. Use `TERecipeKwargs` or `MSAMPRecipeKwargs`.

    Args:
        backend (`"TE"` or `"MSAMP"`): The library that the other fields are for. By default the installed one, MS-AMP
            first.
        optimization_level (`"O1"` or `"O2"`, *optional*): Alias of `opt_level`.

    Raises:
        ValueError: When `opt_level` and `optimization_level` are both given and differ.
    """

    backend: Backend = option(
        None,
        choices=("MSAMP", "TE"),
        env="ACCELERATE_FP8_BACKEND",
        help="Library that computes in FP8.",
    )
    optimization_level: InitVar[OptLevel | None] = None

    def __post_init__(self, optimization_level: OptLevel | None = None) -> None:
        if optimization_level is not None:
            if self.opt_level not in (None, optimization_level):
                raise ValueError(
                    f"opt_level={self.opt_level!r} and optimization_level={optimization_level!r} are the same option. "
                    "Pass only opt_level."
                )
            self.opt_level = optimization_level
        resolve_options(self, ("backend",))
        if self.backend is None:
            from accel_state.libraries import is_msamp_available

            self.backend = "MSAMP" if is_msamp_available() else "TE"
        if not is_making_defaults():
            warn_user(f"FP8RecipeKwargs is deprecated. {INSTEAD[self.backend]}", FutureWarning)
        super().__post_init__()
        if self.backend == "MSAMP":
            resolve_options(self, ("opt_level",))

    @override
    def _require_library(self) -> None:
        if self.backend == "TE":
            super()._require_library()
