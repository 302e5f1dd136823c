"""Methods that belong to keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.commands.menu.keymap import KEYMAP as KEYMAP
from accelerate.commands.menu.keymap import get_character

Method = TypeVar("Method", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def mark(key: int) -> Callable[[Method], Method]:
    """Let a method answer to a key; a method may answer to several.

    Args:
        key: One of the values of `KEYMAP`.
    """
    return mark_multiple(key)


def mark_multiple(*keys: int) -> Callable[[Method], Method]:
    """Let a method answer to several keys."""

    def decorate(method: Method) -> Method:
        method.handle_key = [*getattr(method, "handle_key", []), *keys]  # type: ignore[attr-defined]
        return method

    return decorate


class KeyHandler(type):
    """Metaclass of classes whose marked methods answer to keys.

    A class gets `key_handler`, key -> method, and `handle_input`, which waits for one key.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], attrs: dict[str, Any]) -> KeyHandler:
        """Make the class and collect its marked methods."""
        handler_class = super().__new__(cls, name, bases, attrs)
        if not hasattr(handler_class, "key_handler"):
            handler_class.key_handler = {}  # type: ignore[attr-defined]
        handler_class.handle_input = KeyHandler.handle_input  # type: ignore[method-assign]
        for value in attrs.values():
            handler_class.key_handler |= dict.fromkeys(getattr(value, "handle_key", []), value)  # type: ignore[attr-defined]
        return handler_class

    @staticmethod
    def handle_input(cls: Any) -> Any:
        """Wait for a key.

        Args:
            cls: The object whose method is called; `current_selection` is set to the key.

        Returns:
            What the method gave, or None for a key that none answers to.
        """
        char = get_character()
        key = ord(char) if isinstance(char, str) else char
        method = cls.key_handler.get(key)
        if method is None:
            return None
        cls.current_selection = key
        return method(cls)


def register(cls: Class) -> Any:
    """Make a class anew with `KeyHandler` as its metaclass."""
    return KeyHandler(cls.__name__, cls.__bases__, dict(cls.__dict__))
