"""The record of everything that came through `prepare`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import nn

    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_integrations.prepared.scheduler import AcceleratedScheduler

PREPARED_MARK = "_is_accelerate_prepared"
"""The attribute of everything that came through `prepare`; read by other libraries."""

K = TypeVar("K")
V = TypeVar("V")


class Notes(WeakKeyDictionary[K, V]):
    """Weakly keyed notes of an engine about objects. A pickled copy is empty: it has other objects."""

    def __reduce__(self) -> Any:
        return type(self), ()


def is_prepared(item: Any) -> bool:
    """Whether an object came through the `prepare` of any accelerator."""
    return bool(getattr(item, PREPARED_MARK, False))


@dataclass(slots=True, weakref_slot=True)
class Prepared:
    """Models, optimizers, schedulers, loaders and custom objects, each list in the order of preparation.

    The accelerator and its engine share one instance; the lists are changed in place and never replaced, because
    other libraries hold on to `accelerator._models` and its siblings.
    """

    models: list[nn.Module] = field(default_factory=list)
    """The models as users built them; checkpoint hooks get these."""
    wrapped: list[nn.Module] = field(default_factory=list)
    """The wrapped models that `prepare` returned, in the same order."""
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)
    _freed: list[Callable[[], Any]] = field(default_factory=list)
    """References to the custom objects of before `clear`."""

    def wrapped_of(self, models: Sequence[nn.Module]) -> list[nn.Module]:
        """The wrapped models of those prepared models that are in a list."""
        return [wrapped for inner, wrapped in zip(self.models, self.wrapped, strict=False) if inner in models]

    def keep_model(self, inner: nn.Module, wrapped: Any) -> Any:
        """Record a model.

        Args:
            inner: The one that the user built.
            wrapped: The wrapped model, which is returned.
        """
        self.models.append(inner)
        return keep(self.wrapped, wrapped)

    def registered(self) -> list[Any]:
        """The custom objects; of those from before `clear`, the ones that the program still has."""
        self.custom[:0] = [item for reference in self._freed if (item := reference()) is not None]
        self._freed.clear()
        return self.custom

    def clear(self) -> None:
        """Forget everything, and custom objects registered for checkpoints once the program has let go of them."""
        self._freed = [_reference(item) for item in self.registered()]
        for record in (self.models, self.wrapped, self.optimizers, self.schedulers, self.dataloaders, self.custom):
            record.clear()


def _reference(item: Any) -> Callable[[], Any]:
    """A weak reference, or a strong one where its class allows none."""
    try:
        return weakref.ref(item)
    except TypeError:
        return lambda: item


def find(record: Sequence[Any], item: Any, inner: Callable[[Any], Any]) -> Any:
    """The recorded object that is `item`, or was made from it; None when there is none."""
    for candidate in record:
        if candidate is item or inner(candidate) is item:
            return candidate
    return None


def keep(record: list[Any], item: Any) -> Any:
    """Mark an object as prepared, record it once, and return it."""
    setattr(item, PREPARED_MARK, True)
    if not any(candidate is item for candidate in record):
        record.append(item)
    return item
