"""Questions about mixed precision, FP8 and torch.compile."""

from __future__ import annotations

from accel_cli.launch.flags.table import find
from accel_cli.questionnaire.answer import Choice, Text, Truth, choice
from accel_cli.questionnaire.machine import ACCELERATORS, in_fp8, on_cpu
from accel_cli.questionnaire.question import Answers, Question, Topic, about, every, opposite, said
from accel_state.environment import str_to_bool
from accel_state.settings.compile import MISSPELT_BACKENDS

DTYPE = "Mixed precision?"

PRECISION = Topic(
    "Mixed precision",
    (
        about("mixed_precision", "no", in_fp8, text=DTYPE),
        about("mixed_precision", "no", every(said("machine", *ACCELERATORS), opposite(in_fp8)),
              kind=choice("no", "fp16", "bf16"), text=DTYPE),
        about("mixed_precision", "no", lambda answers: on_cpu(answers) or answers["machine"] == "XLA",
              kind=choice("no", "bf16"), text=DTYPE),
    ),
    # it is in DeepSpeed's own file then
    asked_when=opposite(said("deepspeed_config_file")),
)  # fmt: skip

with_te = said("fp8_backend", "TE")
FP8_BACKENDS = Choice((("AO", "torchao"), ("TE", "Transformer Engine"), ("MSAMP", "MS-AMP")))


def are_three(value: str, answers: Answers) -> str:
    """Reject anything but three bools."""
    words = [word.strip() for word in value.split(",")]
    try:
        known = [str_to_bool(word) for word in words]
    except ValueError:
        known = []
    return "" if len(known) == 3 else f"{value!r} is not three bools such as false,false,true."


FP8 = Topic(
    "FP8",
    (
        about("fp8_backend", "AO", kind=FP8_BACKENDS),
        about("fp8_use_autocast_during_eval", False, with_te),
        about("fp8_margin", 0, with_te),
        about("fp8_interval", 1, with_te),
        about("fp8_format", "HYBRID", with_te),
        about("fp8_amax_history_len", 1024, with_te),
        about("fp8_amax_compute_algo", "most_recent", with_te),
        about("fp8_override_linear_precision", "false,false,false", with_te, kind=Text(), wrong=are_three),
        about("fp8_opt_level", "O2", said("fp8_backend", "MSAMP")),
        about("fp8_enable_fsdp_float8_all_gather", True, every(said("fp8_backend", "AO"), said("way", "FSDP"))),
        about("fp8_pad_inner_dim", True, said("fp8_backend", "AO")),
    ),
    section="fp8_config",
    asked_when=said("mixed_precision", "fp8"),
)

_row = find("dynamo_backend")
COMPILERS = [word for word in _row.kind.choices if word not in ("no", *MISSPELT_BACKENDS)] if _row is not None else []
BACKENDS = [word.upper() for word in COMPILERS]
_AS_IN_1 = {right: wrong for wrong, right in MISSPELT_BACKENDS.items()}
_NOT_IN_1 = ("hpu_backend", "neuron")
DYNAMO_BACKENDS = [_AS_IN_1.get(word, word).upper() for word in COMPILERS if word not in _NOT_IN_1]  # those of 1.15

DYNAMO = Topic(
    "torch.compile",
    (
        Question("compiles", "Compile the model with torch.compile?", Truth(), False, is_saved=False),
        about("dynamo_backend", "INDUCTOR", said("compiles"),
              kind=Choice(tuple((word, word.lower()) for word in BACKENDS)), text="Backend of torch.compile"),
        Question("compiles_otherwise", "Change how it compiles?", Truth(), False, said("compiles"), is_saved=False),
        about("dynamo_mode", "default", said("compiles_otherwise")),
        about("dynamo_use_fullgraph", False, said("compiles_otherwise")),
        about("dynamo_use_dynamic", False, said("compiles_otherwise")),
        about("dynamo_use_regional_compilation", False, said("compiles_otherwise")),
    ),
    section="dynamo_config",
)  # fmt: skip
