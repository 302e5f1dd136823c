"""The old path of keys and their codes."""

from accel_cli.menu.keys import ARROW_KEY_FLAG as ARROW_KEY_FLAG
from accel_cli.menu.keys import KEYMAP as KEYMAP
from accel_cli.menu.keys import get_character as get_character
from accel_cli.menu.keys import get_raw_chars as get_raw_chars
