"""Compatibility path for writing default settings."""

from accel_cli.config import DEFAULT_HELP as DEFAULT_HELP
from accel_cli.config import default_command_parser as default_command_parser
from accel_cli.config import default_config_command as default_config_command
from accel_cli.configfile.location import default_json_config_file as default_json_config_file
from accel_cli.configfile.write import write_basic_config as write_basic_config

description = DEFAULT_HELP
