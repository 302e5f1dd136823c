"""Questions about training in 8-bit floating point."""

from __future__ import annotations

from typing import Any

from accel_cli.questionnaire.answer import Choice, Number, Text, Truth, choice
from accel_cli.questionnaire.question import Answers, Condition, Question, Topic, every, said
from accel_state.environment import str_to_bool

BACKENDS = Choice((("AO", "torchao"), ("TE", "Transformer Engine"), ("MSAMP", "MS-AMP")))
with_te: Condition = said("fp8_backend", "TE")


def are_three(value: str, answers: Answers) -> str:
    """Refuse anything but three truth values."""
    words = [word.strip() for word in value.split(",")]
    try:
        known = [str_to_bool(word) for word in words]
    except ValueError:
        known = []
    return "" if len(known) == 3 else f"{value!r} is not three truth values such as false,false,true."


def _te(key: str, text: str, kind: Any, default: Any, **rest: Any) -> Question:
    return Question(key, text, kind, default, with_te, **rest)


FP8 = Topic(
    "8-bit floating point",
    (
        Question("fp8_backend", "Which library computes in FP8?", BACKENDS, "AO"),
        _te("fp8_use_autocast_during_eval", "Use FP8 in evaluation, too?", Truth(), False),
        _te("fp8_margin", "Margin of the scaling factor?", Number(least=0), 0),
        _te("fp8_interval", "After how many steps is the scaling factor computed anew?", Number(least=1), 1),
        _te("fp8_format", "Which format? HYBRID is E4M3 forward and E5M2 backward", choice("HYBRID", "E4M3", "E5M2"),
            "HYBRID"),
        _te("fp8_amax_history_len", "For how many steps are maxima kept?", Number(least=1), 1024),
        _te("fp8_amax_compute_algo", "Which of the maxima counts?", choice("max", "most_recent"), "most_recent"),
        _te("fp8_override_linear_precision",
            "Which passes are in higher precision: forward, data gradient, weight gradient? As in false,false,true",
            Text(), "false,false,false", wrong=are_three),
        Question("fp8_opt_level", "Which optimization level of MS-AMP?", choice("O1", "O2"), "O2",
                 said("fp8_backend", "MSAMP")),
        Question("fp8_enable_fsdp_float8_all_gather", "Gather FSDP's parameters in 8 bits?", Truth(), True,
                 every(said("fp8_backend", "AO"), said("way", "FSDP"))),
        Question("fp8_pad_inner_dim", "Pad matrices to a multiple of 16?", Truth(), True, said("fp8_backend", "AO")),
    ),
    section="fp8_config",
    asked_when=said("mixed_precision", "fp8"),
)  # fmt: skip
