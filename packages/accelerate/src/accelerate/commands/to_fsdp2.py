"""The old path of `accelerate to-fsdp2`."""

import sys

from accel_cli.main import to_fsdp2_main as main
from accel_cli.to_fsdp2 import ARGUMENT_KEY_MAPPING as ARGUMENT_KEY_MAPPING
from accel_cli.to_fsdp2 import ARGUMENT_VALUE_MAPPING as ARGUMENT_VALUE_MAPPING
from accel_cli.to_fsdp2 import ConversionStatus as ConversionStatus
from accel_cli.to_fsdp2 import convert_config_to_fsdp2 as convert_config_to_fsdp2
from accel_cli.to_fsdp2 import load_config as load_config
from accel_cli.to_fsdp2 import to_fsdp2_command as to_fsdp2_command
from accel_cli.to_fsdp2 import to_fsdp2_command_parser as to_fsdp2_command_parser

if __name__ == "__main__":
    sys.exit(main())
