"""The old path of `accelerate env`."""

import sys

from accel_cli.env import env_command as env_command
from accel_cli.env import env_command_parser as env_command_parser
from accel_cli.main import env_main as main

if __name__ == "__main__":
    sys.exit(main())
