"""All checks of `accelerate test`.

By itself: `accelerate launch --num_processes 2 .../test_utils/scripts/test_script.py`.
"""

from __future__ import annotations

import sys

from accelerate.test_utils.scripts.checks.checkpoints import CHECKPOINTS
from accelerate.test_utils.scripts.checks.collectives import COLLECTIVES
from accelerate.test_utils.scripts.checks.control import CONTROL
from accelerate.test_utils.scripts.checks.loaders import LOADERS
from accelerate.test_utils.scripts.checks.precision import PRECISION
from accelerate.test_utils.scripts.checks.randomness import RANDOMNESS
from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.test_utils.scripts.checks.training import TRAINING

CHECKS = (*CONTROL, *COLLECTIVES, *RANDOMNESS, *LOADERS, *TRAINING, *PRECISION, *CHECKPOINTS)


def main() -> int:
    """Run all checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(CHECKS)


if __name__ == "__main__":
    sys.exit(main())
