"""Compatibility path for `accelerate env`."""

import sys
from argparse import Namespace
from shutil import which as which
from typing import Any

from accel_cli import env
from accel_cli.env import env_command_parser as env_command_parser
from accel_cli.main import env_main as main
from accelerate.compat.seams import late_bound


def env_command(args: Namespace) -> dict[str, Any]:
    """Print and return what is known about this installation, as `accel_cli.env.env_command`; finds by `which`."""
    return env.env_command(args, late_bound("accelerate.commands.env", "which"))


if __name__ == "__main__":
    sys.exit(main())
