"""Compatibility path for the parser in which flags have two spellings."""

from accel_cli.arguments import CommandArgumentGroup as CustomArgumentGroup
from accel_cli.arguments import CommandParser as CustomArgumentParser

__all__ = ["CustomArgumentGroup", "CustomArgumentParser"]
