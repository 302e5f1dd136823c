"""Recipes for computing in 8-bit floats, one class per library that does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal

from accel_state.errors import missing_library
from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.handlers import KwargsHandler
from accel_state.settings.option import (
    BOOLEAN,
    FUNCTION,
    Kind,
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
THREE_FLAGS = Kind(
    "three truth values, for forward, data gradient and weight gradient",
    str,
    lambda value: isinstance(value, (tuple, list)) and len(value) == 3 and all(isinstance(row, bool) for row in value),
)


@known_as("accelerate.utils.dataclasses.AORecipeKwargs")
@guess_arguments
@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao converts linear layers to float8.

    Args:
        config (`torchao.float8.Float8LinearConfig`, *optional*): The whole recipe; made from the two switches below
            when left out.
        module_filter_func (function, *optional*): Takes a module and its name, says whether it is converted. By
            default all linear layers but the first and the last.
        pad_inner_dim (`bool`): Pad matrices whose sizes are no multiple of 16.
        enable_fsdp_float8_all_gather (`bool`): Gather sharded weights in float8.

    Raises:
        MissingLibraryError: When torchao is not installed.
    """

    slot = "fp8"

    config: Float8LinearConfig | None = None
    module_filter_func: Callable[..., Any] | None = option(None, kind=FUNCTION)
    pad_inner_dim: bool | None = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_FP8_PAD_INNER_DIM",
        flag="--fp8_pad_inner_dim",
        help="Pad matrices whose sizes are no multiple of 16 (torchao).",
        fallback=True,
    )
    enable_fsdp_float8_all_gather: bool | None = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
        flag="--fp8_enable_fsdp_float8_all_gather",
        help="Gather sharded weights in float8 (torchao).",
        fallback=True,
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

    def _warn_of_ignored(self, switches: tuple[str, ...]) -> None:
        ignored = [f"{name}={getattr(self, name)!r}" for name in switches if getattr(self, name) is not None]
        if ignored:
            warn_user(f"AORecipeKwargs: {' and '.join(ignored)} has no effect beside a whole config: set it there.")


@known_as("accelerate.utils.dataclasses.TERecipeKwargs")
@guess_arguments
@dataclass
class TERecipeKwargs(KwargsHandler):
    """How Transformer Engine scales 8-bit floats, see its `DelayedScaling`.

    Args:
        use_autocast_during_eval (`bool`): Compute in 8 bits in evaluation too.
        margin (`int`): Powers of two kept free above the largest value.
        interval (`int`): Steps between new scales.
        fp8_format (`"HYBRID"`, `"E4M3"` or `"E5M2"`): HYBRID is E4M3 forward and E5M2 backward.
        amax_history_len (`int`): Steps whose largest values are remembered.
        amax_compute_algo (`"max"` or `"most_recent"`): Which of the remembered values sets the scale.
        override_linear_precision (three `bool`): Whether forward, data gradient and weight gradient of linear layers
            stay in higher precision.
        use_mxfp8_block_scaling (`bool`): Scale blocks of 32 values by themselves; needs hardware support.

    Raises:
        MissingLibraryError: When Transformer Engine is not installed.
    """

    slot = "fp8"

    use_autocast_during_eval: bool | None = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL",
        flag="--fp8_use_autocast_during_eval",
        help="Compute in 8 bits in evaluation too (Transformer Engine).",
        fallback=False,
    )
    margin: int | None = option(
        None,
        kind=at_least(0),
        env="ACCELERATE_FP8_MARGIN",
        flag="--fp8_margin",
        help="Powers of two kept free above the largest value (Transformer Engine).",
        fallback=0,
    )
    interval: int | None = option(
        None,
        kind=at_least(1),
        env="ACCELERATE_FP8_INTERVAL",
        flag="--fp8_interval",
        help="Steps between new scales (Transformer Engine).",
        fallback=1,
    )
    fp8_format: FP8Format = option(
        None,
        choices=("HYBRID", "E4M3", "E5M2"),
        env="ACCELERATE_FP8_FORMAT",
        flag="--fp8_format",
        help="Layout of the 8 bits (Transformer Engine).",
        fallback="HYBRID",
    )
    amax_history_len: int | None = option(
        None,
        kind=at_least(1),
        env="ACCELERATE_FP8_AMAX_HISTORY_LEN",
        flag="--fp8_amax_history_len",
        help="Steps whose largest values are remembered (Transformer Engine).",
        fallback=1024,
    )
    amax_compute_algo: AmaxComputeAlgorithm = option(
        None,
        choices=("max", "most_recent"),
        env="ACCELERATE_FP8_AMAX_COMPUTE_ALGO",
        flag="--fp8_amax_compute_algo",
        help="Which remembered value sets the scale (Transformer Engine).",
        fallback="most_recent",
    )
    override_linear_precision: tuple[bool, bool, bool] = option(
        None,
        kind=THREE_FLAGS,
        flag="--fp8_override_linear_precision",
        help="Whether forward, data gradient and weight gradient keep higher precision (Transformer Engine).",
    )
    use_mxfp8_block_scaling: bool | None = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING",
        help="Scale blocks of 32 values by themselves (Transformer Engine).",
        fallback=False,
    )

    def __post_init__(self) -> None:
        self._require_library()
        resolve_options(self, options_of(TERecipeKwargs))
        if self.override_linear_precision is None:
            self.override_linear_precision = _linear_precision_from_environment()

    def _require_library(self) -> None:
        from accel_state.libraries import is_transformer_engine_available

        if not is_transformer_engine_available():
            raise missing_library("transformer-engine", why=type(self).__name__)


def _linear_precision_from_environment() -> tuple[bool, bool, bool]:
    from accel_state.environment import parse_flag_from_env

    forward, data, weight = (
        not is_making_defaults() and parse_flag_from_env(f"ACCELERATE_FP8_OVERRIDE_{direction}")
        for direction in DIRECTIONS
    )
    return forward, data, weight


@known_as("accelerate.utils.dataclasses.MSAMPRecipeKwargs")
@guess_arguments
@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """How much of training MS-AMP keeps in 8 bits.

    Args:
        opt_level (`"O1"` or `"O2"`): O1: weights and gradients; O2: the optimizer's state as well.
    """

    slot = "fp8"

    opt_level: OptLevel = option(
        None,
        kind=one_of("O1", "O2"),
        env="ACCELERATE_FP8_OPT_LEVEL",
        flag="--fp8_opt_level",
        help="How much is kept in 8 bits (MS-AMP).",
        fallback="O2",
    )

    def __post_init__(self) -> None:
        resolve_options(self)


@known_as("accelerate.utils.dataclasses.FP8RecipeKwargs")
@guess_arguments
@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Either of two recipes in one class; use `TERecipeKwargs` or `MSAMPRecipeKwargs` instead.

    Args:
        backend (`"TE"` or `"MSAMP"`): Which library the other fields are for. Without it the installed one is taken,
            MS-AMP first.
        optimization_level (`"O1"` or `"O2"`, *optional*): Another name of `opt_level`.

    Raises:
        ValueError: When `opt_level` and `optimization_level` are both given and differ.
    """

    backend: Backend = option(
        None,
        choices=("MSAMP", "TE"),
        env="ACCELERATE_FP8_BACKEND",
        flag="--fp8_backend",
        help="Library that computes in 8-bit floats.",
    )
    optimization_level: InitVar[OptLevel | None] = None

    def __post_init__(self, optimization_level: OptLevel | None = None) -> None:
        if optimization_level is not None:
            if self.opt_level not in (None, optimization_level):
                raise ValueError(
                    f"opt_level={self.opt_level!r} and optimization_level={optimization_level!r} name one thing: "
                    "pass only opt_level."
                )
            self.opt_level = optimization_level
        resolve_options(self, ("backend",))
        if self.backend is None:
            from accel_state.libraries import is_msamp_available

            self.backend = "MSAMP" if is_msamp_available() else "TE"
        if not is_making_defaults():
            recipe = "TERecipeKwargs" if self.backend == "TE" else "MSAMPRecipeKwargs"
            warn_user(f"FP8RecipeKwargs is deprecated: use {recipe}.", FutureWarning)
        super().__post_init__()
        if self.backend == "MSAMP":
            resolve_options(self, ("opt_level",))

    def _require_library(self) -> None:
        if self.backend == "TE":
            super()._require_library()
