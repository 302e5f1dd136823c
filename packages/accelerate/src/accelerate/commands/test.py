"""The old path of `accelerate test`."""

import sys

from accel_cli.later import test_command_parser as test_command_parser
from accel_cli.main import test_main as main

if __name__ == "__main__":
    sys.exit(main())
