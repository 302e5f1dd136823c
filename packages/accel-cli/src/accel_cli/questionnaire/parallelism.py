"""Questions about combining several kinds of parallelism."""

from __future__ import annotations

from math import prod
from typing import Any

from accel_cli.questionnaire.answer import Number, Text, Truth, choice
from accel_cli.questionnaire.question import Answers, Condition, Question, Topic, every, said

PREFIX = "parallelism_config_"
AXES = ("tp_size", "cp_size", "sp_size", "dp_replicate_size")

with_fsdp2: Condition = every(said("way", "FSDP"), said("fsdp_version", 2))
with_deepspeed: Condition = said("way", "DEEPSPEED")


def rest(answers: Answers) -> int:
    """How many processes are left for the axes that have no size yet."""
    taken: int = prod(answers.get(f"{PREFIX}{axis}", 1) for axis in AXES)
    return int(answers["num_processes"]) // taken


def fits(value: int, answers: Answers) -> str:
    """Refuse a size that does not divide the processes that are left."""
    left = rest(answers)
    return f"{left} processes are left, and {value} does not divide them." if left % value else ""


def copies_fit(value: int, answers: Answers) -> str:
    """Refuse copies that leave nothing to shard while layers or sequences are shared."""
    if reason := fits(value, answers):
        return reason
    shared = any(answers.get(f"{PREFIX}{axis}", 1) > 1 for axis in ("tp_size", "cp_size"))
    if value > 1 and shared and rest(answers) == value:
        return "Sharing layers or sequences needs a sharded model: leave processes for the sharding."
    return ""


def sharding(answers: Answers) -> dict[str, int]:
    """Give the processes that are left to the axis that nobody is asked about: the sharding of one copy."""
    return {f"{PREFIX}dp_shard_size": rest(answers)} if answers.get("combines") else {}


def _size(axis: str, text: str, wrong: Any = fits, **more: Any) -> Question:
    return Question(f"{PREFIX}{axis}_size", text, Number(least=1), 1, wrong=wrong, **more)


PARALLELISM = Topic(
    "Combined parallelism",
    (
        Question("combines", "Share layers or sequences among processes, too (tensor, context parallelism)?", Truth(),
                 False, with_fsdp2, is_saved=False),
        Question("combines", "Share sequences among processes, too (sequence parallelism)?", Truth(), False,
                 with_deepspeed, is_saved=False),
        _size("tp", "How many processes share every layer (tensor parallelism)?",
              asked_when=every(with_fsdp2, said("combines"))),
        _size("cp", "How many processes share every sequence (context parallelism)?",
              asked_when=every(with_fsdp2, said("combines"))),
        Question(f"{PREFIX}cp_comm_strategy", "How do they exchange keys and values?",
                 choice("allgather", "alltoall"), "allgather",
                 lambda answers: answers.get(f"{PREFIX}cp_size", 1) > 1),
        _size("sp", "How many processes share every sequence (sequence parallelism)?",
              asked_when=every(with_deepspeed, said("combines"))),
        Question(f"{PREFIX}sp_seq_length", "How long are the sequences? Nothing where that is not known",
                 Number(least=1), None, lambda answers: answers.get(f"{PREFIX}sp_size", 1) > 1, is_required=False),
        Question(f"{PREFIX}sp_seq_length_is_variable", "Does the length change from batch to batch?", Truth(), True,
                 lambda answers: answers.get(f"{PREFIX}sp_size", 1) > 1),
        Question(f"{PREFIX}sp_attn_implementation", "Which implementation of attention has the model?",
                 Text(without_blanks=True), "sdpa", lambda answers: answers.get(f"{PREFIX}sp_size", 1) > 1),
        _size("dp_replicate", "How many copies of the model are there? The other processes shard each of them", copies_fit, asked_when=said("combines")),
    ),
    section="parallelism_config",
    asked_when=lambda answers: (
        (with_fsdp2(answers) or with_deepspeed(answers)) and answers.get("num_processes", 1) > 1
    ),
)  # fmt: skip
