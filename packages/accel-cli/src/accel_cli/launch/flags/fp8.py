"""Options of training in 8-bit floating point."""

from __future__ import annotations

from argparse import Namespace

from accel_cli.arguments import Option, switch
from accel_cli.launch.flags.group import OptionGroup
from accel_state.environment import str_to_bool


def three_truths(text: str) -> tuple[int | bool, ...]:
    """Read three bools separated by commas: forward, data gradient, weight gradient; a single one means all three."""
    values = tuple(str_to_bool(part.strip()) for part in text.split(","))
    if len(values) not in (1, 3):
        raise ValueError(f"one value or three are needed, got {text!r}")
    return values if len(values) == 3 else values * 3


def _in_fp8(settings: Namespace) -> bool:
    return str(settings.mixed_precision).lower() == "fp8"


_OVERRIDES = "ACCELERATE_FP8_OVERRIDE_FPROP ACCELERATE_FP8_OVERRIDE_DGRAD ACCELERATE_FP8_OVERRIDE_WGRAD"

FP8 = OptionGroup(
    "FP8 Arguments",
    (
        Option("--fp8_backend", "Library to use: torchao, Transformer Engine or MS-AMP.",
               choices=("ao", "te", "msamp"), environment="ACCELERATE_FP8_BACKEND"),
        switch("--fp8_use_autocast_during_eval", "Transformer Engine: FP8 in evaluation, too.",
               environment="ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL"),
        Option("--fp8_margin", "Transformer Engine: margin of the scaling factor.", default=0, type=int, metavar="N",
               environment="ACCELERATE_FP8_MARGIN"),
        Option("--fp8_interval", "Transformer Engine: steps between new scaling factors.", default=1, type=int,
               metavar="N", environment="ACCELERATE_FP8_INTERVAL"),
        Option("--fp8_format", "Transformer Engine: number format.", default="HYBRID",
               choices=("HYBRID", "E4M3", "E5M2"), environment="ACCELERATE_FP8_FORMAT"),
        Option("--fp8_amax_history_len", "Transformer Engine: steps whose maxima are kept.", default=1024, type=int,
               metavar="N", environment="ACCELERATE_FP8_AMAX_HISTORY_LEN"),
        Option("--fp8_amax_compute_algo", "Transformer Engine: which maximum counts.", default="most_recent",
               choices=("max", "most_recent"), environment="ACCELERATE_FP8_AMAX_COMPUTE_ALGO"),
        Option("--fp8_override_linear_precision",
               "Transformer Engine: three truth values, for passes in higher precision: forward, data gradient, "
               "weight gradient.",
               default=(False, False, False), type=three_truths, metavar="F,D,W", environment=_OVERRIDES),
        Option("--fp8_opt_level", "MS-AMP: optimization level.", default="O2", choices=("O1", "O2"),
               environment="ACCELERATE_FP8_OPT_LEVEL"),
        Option("--fp8_enable_fsdp_float8_all_gather", "torchao: gather FSDP parameters in 8 bits: true or false.",
               default="true", type=str_to_bool, metavar="BOOL",
               environment="ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"),
        Option("--fp8_pad_inner_dim", "torchao: pad matrices to a multiple of 16: true or false.", default="true",
               type=str_to_bool, metavar="BOOL", environment="ACCELERATE_FP8_PAD_INNER_DIM"),
    ),
    shown_with="--fp8_backend",
    handed_when=_in_fp8,
    counts_with="--mixed_precision fp8",
)  # fmt: skip
