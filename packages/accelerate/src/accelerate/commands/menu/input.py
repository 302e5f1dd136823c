"""Compatibility path for methods that answer keys."""

from accelerate.compat.menu.handlers import KeyHandler as KeyHandler
from accelerate.compat.menu.handlers import mark as mark
from accelerate.compat.menu.handlers import mark_multiple as mark_multiple
from accelerate.compat.menu.handlers import register as register
from accelerate.compat.menu.keys import KEYMAP as KEYMAP
from accelerate.compat.menu.keys import get_character as get_character
