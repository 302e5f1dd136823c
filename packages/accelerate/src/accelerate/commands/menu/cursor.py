"""Compatibility path for hiding the cursor."""

from accelerate.compat.menu.cursor import hide as hide
from accelerate.compat.menu.cursor import hide_cursor as hide_cursor
from accelerate.compat.menu.cursor import show_cursor as show_cursor
