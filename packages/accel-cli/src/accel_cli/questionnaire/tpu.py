"""Questions about TPUs."""

from __future__ import annotations

import os

from accel_cli.questionnaire.answer import Choice, Path, Text, Truth, Words
from accel_cli.questionnaire.question import Answers, Question, Topic, said

COMMANDS = Choice((("none", "none"), ("file", "those in a file"), ("typed", "some that I type now")))
NAMES = Words(r"[\w.:/-]+", "the name or address of a machine")
LINES = Words(separator=";")
VARIABLES = Words(r"[A-Za-z_]\w*=.*", "a variable such as NAME=value")


def is_there(value: str, answers: Answers) -> str:
    """Refuse a file that does not exist."""
    return "" if os.path.isfile(value) else f"There is no file {value!r}."


TPU = Topic(
    "TPU",
    (
        Question("main_training_function", "Which function of the script is called on each core?",
                 Text(without_blanks=True), "main"),
        Question("downcast_bf16", "Use bfloat16 for both float and double?", Truth(), False),
        Question("tpu_use_cluster", "Is it a pod of several machines?", Truth(), False),
        Question("tpu_name", "What is the TPU called?", Text(without_blanks=True), None, said("tpu_use_cluster")),
        Question("tpu_zone", "In which zone is it?", Text(without_blanks=True), None, said("tpu_use_cluster")),
        Question("tpu_use_sudo", "Run commands there with sudo?", Truth(), False, said("tpu_use_cluster")),
        Question("commands_from", "Which commands do the machines run first?", COMMANDS, "none",
                 said("tpu_use_cluster"), is_saved=False),
        Question("command_file", "Which file?", Path(), None, said("commands_from", "file"), is_there),
        Question("commands", "Which commands? With semicolons between them", LINES, None,
                 said("commands_from", "typed")),
        Question("tpu_vm", "Which machines of the pod? Names with commas between them, nothing for all", NAMES, None,
                 said("tpu_use_cluster"), is_required=False),
        Question("tpu_env", "Which variables are set there? As in NAME=value, nothing for none", VARIABLES, None,
                 said("tpu_use_cluster"), is_required=False),
    ),
    asked_when=said("machine", "XLA"),
)  # fmt: skip
