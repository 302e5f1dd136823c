"""Compatibility path for updating a config file."""

from accel_cli.config import UPDATE_HELP as UPDATE_HELP
from accel_cli.config import update_command_parser as update_command_parser
from accel_cli.config import update_config as update_config
from accel_cli.config import update_config_command as update_config_command
from accel_cli.configfile.location import default_config_file as default_config_file
from accel_cli.configfile.read import load_config_from_file as load_config_from_file

description = UPDATE_HELP
