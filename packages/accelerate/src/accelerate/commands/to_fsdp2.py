"""Compatibility path for `accelerate to-fsdp2`."""

import sys
from argparse import Namespace

from accel_cli import to_fsdp2
from accel_cli.main import to_fsdp2_main as main
from accel_cli.to_fsdp2 import ARGUMENT_KEY_MAPPING as ARGUMENT_KEY_MAPPING
from accel_cli.to_fsdp2 import ARGUMENT_VALUE_MAPPING as ARGUMENT_VALUE_MAPPING
from accel_cli.to_fsdp2 import ConversionStatus as ConversionStatus
from accel_cli.to_fsdp2 import convert_config_to_fsdp2 as convert_config_to_fsdp2
from accel_cli.to_fsdp2 import load_config as load_config
from accel_cli.to_fsdp2 import to_fsdp2_command_parser as to_fsdp2_command_parser
from accelerate.compat.seams import late_bound


def to_fsdp2_command(args: Namespace) -> None:
    """Convert a config file, as `accel_cli.to_fsdp2.to_fsdp2_command`; reads it with `load_config`."""
    to_fsdp2.to_fsdp2_command(args, late_bound("accelerate.commands.to_fsdp2", "load_config"))


if __name__ == "__main__":
    sys.exit(main())
