"""The old path of methods that answer keys."""

from accel_cli.menu.handlers import KeyHandler as KeyHandler
from accel_cli.menu.handlers import mark as mark
from accel_cli.menu.handlers import mark_multiple as mark_multiple
from accel_cli.menu.handlers import register as register
from accel_cli.menu.keys import KEYMAP as KEYMAP
from accel_cli.menu.keys import get_character as get_character
