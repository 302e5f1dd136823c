"""Lets `python -m accel_cli` run."""

import sys

from accel_cli.main import main

sys.exit(main())
