"""The old path of writing to a terminal."""

from accel_cli.menu.writing import CURSOR_TO_CHAR as CURSOR_TO_CHAR
from accel_cli.menu.writing import TERMINAL_WIDTH as TERMINAL_WIDTH
from accel_cli.menu.writing import Direction as Direction
from accel_cli.menu.writing import clear_line as clear_line
from accel_cli.menu.writing import forceWrite as forceWrite
from accel_cli.menu.writing import linebreak as linebreak
from accel_cli.menu.writing import move_cursor as move_cursor
from accel_cli.menu.writing import reset_cursor as reset_cursor
from accel_cli.menu.writing import writeColor as writeColor
