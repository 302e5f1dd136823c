"""Compatibility path for the menu."""

from accelerate.compat.menu.keys import KEYMAP as KEYMAP
from accelerate.compat.menu.selection import BulletMenu as BulletMenu
from accelerate.compat.menu.selection import in_colab as in_colab
