"""Questions about starting CPU processes with mpirun."""

from __future__ import annotations

import os

from accel_cli.questionnaire.answer import Number, Path, Truth
from accel_cli.questionnaire.question import Question, Topic, every, said

HOSTFILE = os.path.expanduser("~/hostfile")

MPI = Topic(
    "MPI",
    (
        Question("uses_mpirun", "Start the processes with mpirun?", Truth(), False, is_saved=False),
        Question("mpirun_hostfile", "Where is the list of machines (the hostfile)?", Path(), HOSTFILE,
                 said("uses_mpirun")),
        Question("mpirun_ccl", "How many oneCCL worker threads has each process?", Number(least=1), 1,
                 said("uses_mpirun")),
    ),
    section="mpirun_config",
    asked_when=every(said("machine", "MULTI_CPU"), said("way", "PLAIN")),
)  # fmt: skip
