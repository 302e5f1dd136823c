"""The old path of hiding the cursor."""

from accel_cli.menu.cursor import hide as hide
from accel_cli.menu.cursor import hide_cursor as hide_cursor
from accel_cli.menu.cursor import show_cursor as show_cursor
