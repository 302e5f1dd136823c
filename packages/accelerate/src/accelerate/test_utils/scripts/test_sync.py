"""Checks that gradients accumulate to those of one large batch: some of the checks of `accelerate test`.

By itself: `accelerate launch --num_processes 2 .../test_utils/scripts/test_sync.py`.
"""

from __future__ import annotations

import sys

from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.test_utils.scripts.checks.training import TRAINING


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(TRAINING)


if __name__ == "__main__":
    sys.exit(main())
