"""Compatibility path for `accelerate tpu-config`."""

import sys

from accel_cli.main import tpu_main as main
from accel_cli.tpu import tpu_command_launcher as tpu_command_launcher
from accel_cli.tpu import tpu_command_parser as tpu_command_parser

if __name__ == "__main__":
    sys.exit(main())
