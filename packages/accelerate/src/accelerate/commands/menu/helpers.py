"""Compatibility path for writing to a terminal."""

from accelerate.compat.menu.writing import CURSOR_TO_CHAR as CURSOR_TO_CHAR
from accelerate.compat.menu.writing import TERMINAL_WIDTH as TERMINAL_WIDTH
from accelerate.compat.menu.writing import Direction as Direction
from accelerate.compat.menu.writing import clear_line as clear_line
from accelerate.compat.menu.writing import forceWrite as forceWrite
from accelerate.compat.menu.writing import linebreak as linebreak
from accelerate.compat.menu.writing import move_cursor as move_cursor
from accelerate.compat.menu.writing import reset_cursor as reset_cursor
from accelerate.compat.menu.writing import writeColor as writeColor
