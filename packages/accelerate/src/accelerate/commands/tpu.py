"""The old path of `accelerate tpu-config`."""

import sys

from accel_cli.later import tpu_command_parser as tpu_command_parser
from accel_cli.main import tpu_main as main

if __name__ == "__main__":
    sys.exit(main())
