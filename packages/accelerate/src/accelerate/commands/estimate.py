"""The old path of `accelerate estimate-memory`."""

import sys

from accel_cli.later import estimate_command_parser as estimate_command_parser
from accel_cli.main import estimate_main as main

if __name__ == "__main__":
    sys.exit(main())
