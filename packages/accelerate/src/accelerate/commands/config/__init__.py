"""Compatibility path for `accelerate config`."""

from accel_cli.config import config_command_parser as config_command_parser
from accel_cli.config import default_command_parser as default_command_parser
from accel_cli.config import get_config_parser as get_config_parser
from accel_cli.config import update_command_parser as update_command_parser
from accel_cli.configfile.location import default_config_file as default_config_file
from accel_cli.configfile.read import load_config_from_file as load_config_from_file
from accel_cli.main import config_main

main = config_main
