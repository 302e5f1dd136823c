"""Model, optimizer and scheduler among the arguments of `prepare`, for engines that build one thing out of all three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.prepared import is_prepared
from accel_integrations.prepared.scheduler import AcceleratedScheduler


@dataclass(frozen=True)
class PrepareRules:
    """What an engine takes.

    Args:
        engine: Its name, for messages.
        reason: Why an optimizer needs its model in the same call, as the end of a sentence.
        instead: What to do with another model, a sentence.
        optimizers: Classes that stand for optimizers.
        schedulers: Classes that stand for schedulers.
        scheduler_names: Names of further classes of schedulers, which are not imported.
        takes_several: Whether a model may be prepared after another one.
    """

    engine: str
    reason: str
    instead: str
    optimizers: tuple[type[Any], ...] = ()
    schedulers: tuple[type[Any], ...] = ()
    scheduler_names: frozenset[str] = frozenset()
    takes_several: bool = True

    def kind_of(self, item: Any) -> str | None:
        """What an object is: "model", "optimizer" or "scheduler"; None for anything else, and for what is prepared already."""
        if is_prepared(item) or isinstance(item, (AcceleratedOptimizer, AcceleratedScheduler)):
            return None
        if isinstance(item, nn.Module):
            return "model"
        if isinstance(item, (torch.optim.Optimizer, *self.optimizers)):
            return "optimizer"
        is_scheduler = isinstance(item, (torch.optim.lr_scheduler.LRScheduler, *self.schedulers))
        return "scheduler" if is_scheduler or type(item).__name__ in self.scheduler_names else None


@dataclass
class PrepareArguments:
    """Positions of model, optimizer and scheduler among the arguments of `prepare`; None where there is none."""

    model: int | None = None
    optimizer: int | None = None
    scheduler: int | None = None

    @classmethod
    def find(cls, objects: Sequence[Any], rules: PrepareRules, has_model: bool = False) -> PrepareArguments:
        """Find those that are not prepared yet.

        Args:
            objects: The arguments of `prepare`.
            rules: What the engine takes.
            has_model: Whether a model was prepared before.

        Raises:
            ValueError: For two of a kind, or for an optimizer without its model.
        """
        arguments = cls()
        is_full = has_model and not rules.takes_several
        for index, item in enumerate(objects):
            kind = rules.kind_of(item)
            if kind is None:
                continue
            if getattr(arguments, kind) is not None or (kind == "model" and is_full):
                names = [type(argument).__name__ for argument in objects if rules.kind_of(argument) == kind]
                many = f"{len(names)} {kind}s" if len(names) > 1 else f"a second {kind}"
                raise ValueError(
                    f"prepare() got {many} ({', '.join(names)}), but {rules.engine} trains one model with one optimizer "
                    f"and one scheduler. {rules.instead}"
                )
            setattr(arguments, kind, index)
        if arguments.model is None and arguments.optimizer is not None:
            raise ValueError(
                f"prepare() got the optimizer {type(objects[arguments.optimizer]).__name__} without its model, but "
                f"{rules.engine} {rules.reason}. Pass model, optimizer and scheduler to one call of prepare()."
            )
        return arguments

    def pick(self, objects: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Model, optimizer and scheduler; None where there is none."""
        model, optimizer, scheduler = (
            None if index is None else objects[index] for index in (self.model, self.optimizer, self.scheduler)
        )
        return model, optimizer, scheduler

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions that are not None."""
        return tuple(argument for argument in (self.model, self.optimizer, self.scheduler) if argument is not None)
