"""A menu that needs no library, under the names that accelerate 1.15 gave its parts."""

from accelerate.commands.menu.selection_menu import BulletMenu as BulletMenu
