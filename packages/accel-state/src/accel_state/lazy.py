"""Names that import their module on first access (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_exports(
    module_name: str, table: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build the module hooks that make `from package import name` import only what defines `name`.

    Args:
        module_name: The package that re-exports, usually `__name__`.
        table: Defining module -> names separated by blanks, also names of its submodules. `"name=other"` re-exports
            `other` as `name`.

    Returns:
        The three values for `__getattr__`, `__dir__` and `__all__` of the package.

    Example:
        ```python
        __getattr__, __dir__, __all__ = lazy_exports(__name__, {"accel_state.processes": "PartialState"})
        ```
    """
    origin: dict[str, tuple[str, str]] = {}
    for defining_module, names in table.items():
        for entry in names.split():
            name, _, source = entry.partition("=")
            origin[name] = (defining_module, source or name)
    namespace = sys.modules[module_name].__dict__

    def __getattr__(name: str) -> Any:
        try:
            defining_module, source = origin[name]
        except KeyError:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}") from None
        try:
            module = import_module(defining_module)
        except AttributeError as error:  # Python would say no more than that the name cannot be imported
            raise ImportError(f"{module_name}.{name}: {defining_module} cannot be imported: {error}") from error
        value = _find(module, source)
        namespace[name] = value  # the next access is a plain dictionary look-up
        return value

    def __dir__() -> list[str]:
        return sorted(set(namespace) | set(origin))

    return __getattr__, __dir__, sorted(origin)


def _find(module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        if not hasattr(module, "__path__"):
            raise
    return import_module(f"{module.__name__}.{name}")
