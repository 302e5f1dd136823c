"""The old path of `accelerate to-fsdp2`."""

from accel_cli.later import to_fsdp2_command_parser as to_fsdp2_command_parser
