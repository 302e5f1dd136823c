"""Checks that data loaders shard data over the ranks: some of the checks of `accelerate test`.

By itself: `accelerate launch --num_processes 2 .../test_utils/scripts/test_distributed_data_loop.py`.
"""

from __future__ import annotations

import sys

from accelerate.test_utils.scripts.checks.loaders import LOADERS
from accelerate.test_utils.scripts.checks.running import run_checks


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(LOADERS)


if __name__ == "__main__":
    sys.exit(main())
