"""The old path of `accelerate launch`."""

import sys

from accel_cli.launch.command import launch_command as launch_command
from accel_cli.launch.command import launch_command_parser as launch_command_parser
from accel_cli.main import launch_main as main

if __name__ == "__main__":
    sys.exit(main())
