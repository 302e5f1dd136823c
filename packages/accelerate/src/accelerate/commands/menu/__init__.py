"""The old path of menus on a terminal."""

from accelerate.compat.menu.selection import BulletMenu as BulletMenu
