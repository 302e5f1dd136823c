"""The old path of menus on a terminal."""

from accel_cli.menu.selection import BulletMenu as BulletMenu
