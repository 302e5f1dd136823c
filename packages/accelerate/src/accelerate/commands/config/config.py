"""The old path of the questionnaire's parser."""

from accel_cli.config import config_command as config_command
from accel_cli.config import config_command_parser as config_command_parser
from accel_cli.config import get_config_parser as get_config_parser
from accel_cli.main import config_main as main

__all__ = ["config_command", "config_command_parser", "get_config_parser", "main"]
