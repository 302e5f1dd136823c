"""Compatibility path for the program `accelerate`."""

import sys

from accel_cli.main import main as main

if __name__ == "__main__":
    sys.exit(main())
