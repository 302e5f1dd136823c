"""Compatibility path for keys and their codes."""

from accelerate.compat.menu.keys import ARROW_KEY_FLAG as ARROW_KEY_FLAG
from accelerate.compat.menu.keys import KEYMAP as KEYMAP
from accelerate.compat.menu.keys import get_character as get_character
from accelerate.compat.menu.keys import get_raw_chars as get_raw_chars
