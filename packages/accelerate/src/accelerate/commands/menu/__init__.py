"""Compatibility path for menus on a terminal."""

from accelerate.compat.menu.selection import BulletMenu as BulletMenu
