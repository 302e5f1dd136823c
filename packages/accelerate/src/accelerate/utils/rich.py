"""Importing this module installs the traceback handler of the `rich` library."""

from accel_state.errors import missing_library
from accel_state.libraries import is_rich_available as is_rich_available

try:
    from rich.traceback import install
except ModuleNotFoundError:
    raise missing_library("rich", extra="rich", why="The appearance of tracebacks") from None

install(show_locals=False)
