"""The old path of the menu."""

from accel_cli.menu.keys import KEYMAP as KEYMAP
from accel_cli.menu.selection import BulletMenu as BulletMenu
from accel_cli.menu.selection import in_colab as in_colab
