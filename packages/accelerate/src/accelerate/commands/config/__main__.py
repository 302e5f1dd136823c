"""Lets `python -m accelerate.commands.config` run."""

import sys

from accel_cli.main import config_main

sys.exit(config_main())
