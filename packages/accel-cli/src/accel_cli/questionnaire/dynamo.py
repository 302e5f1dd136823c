"""Questions about torch.compile."""

from __future__ import annotations

from accel_cli.launch.flags.general import MISSPELT_BACKENDS
from accel_cli.launch.flags.table import OPTIONS
from accel_cli.questionnaire.answer import Choice, Truth, choice
from accel_cli.questionnaire.question import Question, Topic, said

CHOICES = [word for word in OPTIONS["dynamo_backend"].choices or () if word != "no"]
BACKENDS = [word.upper() for word in CHOICES if word not in MISSPELT_BACKENDS]
DYNAMO_BACKENDS = [word.upper() for word in CHOICES if word not in MISSPELT_BACKENDS.values()]  # as 1.15 spells them

DYNAMO = Topic(
    "torch.compile",
    (
        Question("compiles", "Compile the model with torch.compile?", Truth(), False, is_saved=False),
        Question("dynamo_backend", "Which backend?", Choice(tuple((word, word.lower()) for word in BACKENDS)),
                 "INDUCTOR", said("compiles")),
        Question("compiles_otherwise", "Change how it compiles?", Truth(), False, said("compiles"), is_saved=False),
        Question("dynamo_mode", "What is it to optimise for?", choice(*OPTIONS["dynamo_mode"].choices or ()),
                 "default", said("compiles_otherwise")),
        Question("dynamo_use_fullgraph", "Fail rather than split the model into several graphs?", Truth(), False,
                 said("compiles_otherwise")),
        Question("dynamo_use_dynamic", "Compile for shapes that change?", Truth(), False,
                 said("compiles_otherwise")),
        Question("dynamo_use_regional_compilation", "Compile a repeated block once instead of the whole model?",
                 Truth(), False, said("compiles_otherwise")),
    ),
    section="dynamo_config",
)  # fmt: skip
