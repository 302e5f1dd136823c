"""The old path of updating a settings file."""

from accel_cli.config import update_command_parser as update_command_parser
from accel_cli.config import update_config_command as update_config_command
