"""The old path of `accelerate to-fsdp2`."""

import sys

from accel_cli.later import to_fsdp2_command_parser as to_fsdp2_command_parser
from accel_cli.main import to_fsdp2_main as main

if __name__ == "__main__":
    sys.exit(main())
