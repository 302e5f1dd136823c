"""Run by a launch: all bundled checks of DeepSpeed, which does not survive a second process group."""

import sys

from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.test_utils.scripts.external_deps.test_ds_alst_ulysses_sp import SEQUENCES
from accelerate.test_utils.scripts.external_deps.test_ds_multiple_model import SEVERAL
from accelerate.test_utils.scripts.external_deps.test_zero3_integration import ZERO3

if __name__ == "__main__":
    sys.exit(run_checks((*ZERO3, *SEVERAL, *SEQUENCES)))
