"""Compatibility path for `accelerate test`."""

import sys

from accel_cli.main import test_main as main
from accel_cli.selftest import test_command as test_command
from accel_cli.selftest import test_command_parser as test_command_parser

if __name__ == "__main__":
    sys.exit(main())
