"""The old path of `accelerate merge-weights`."""

import sys

from accel_cli.later import merge_command_parser as merge_command_parser
from accel_cli.main import merge_main as main

if __name__ == "__main__":
    sys.exit(main())
