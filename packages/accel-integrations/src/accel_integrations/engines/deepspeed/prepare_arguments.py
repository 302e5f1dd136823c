"""The model, optimizer and scheduler among the arguments of `prepare`, and whether they fit the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_integrations.deepspeed_dummies import DummyOptim, DummyScheduler
from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.prepared import is_prepared
from accel_state.settings.deepspeed_auto import get_value

OF_DEEPSPEED = frozenset({"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})
"""Schedulers of DeepSpeed, which its engine steps; they are not `LRScheduler`s."""


@dataclass
class PrepareArguments:
    """Positions of model, optimizer and scheduler among the arguments of `prepare`; None where there is none."""

    model: int | None = None
    optimizer: int | None = None
    scheduler: int | None = None

    @classmethod
    def find(cls, objects: Sequence[Any]) -> PrepareArguments:
        """Find those that are not prepared yet.

        Raises:
            ValueError: For two of a kind, or for an optimizer without its model.
        """
        found = cls()
        for index, item in enumerate(objects):
            kind = _kind_of(item)
            if kind is None:
                continue
            if getattr(found, kind) is not None:
                names = [type(one).__name__ for one in objects if _kind_of(one) == kind]
                raise ValueError(
                    f"prepare() got {len(names)} {kind}s ({', '.join(names)}), but a DeepSpeed engine trains one model "
                    "with one optimizer. Create one Accelerator for each model, and prepare them separately."
                )
            setattr(found, kind, index)
        if found.model is None and found.optimizer is not None:
            raise ValueError(
                f"prepare() got the optimizer {type(objects[found.optimizer]).__name__} without its model, but "
                "DeepSpeed builds one engine from both. Pass model, optimizer and scheduler to one call of prepare()."
            )
        return found

    def pick(self, objects: Sequence[Any]) -> tuple[Any, ...]:
        """Model, optimizer and scheduler; None for the latter two where there is none."""
        assert self.model is not None
        others = (None if index is None else objects[index] for index in (self.optimizer, self.scheduler))
        return objects[self.model], *others

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions that are not None."""
        return tuple(one for one in (self.model, self.optimizer, self.scheduler) if one is not None)


def _kind_of(item: Any) -> str | None:
    if is_prepared(item):
        return None
    if isinstance(item, nn.Module):
        return "model"
    if isinstance(item, DummyOptim) or (
        isinstance(item, torch.optim.Optimizer) and not isinstance(item, AcceleratedOptimizer)
    ):
        return "optimizer"
    if is_scheduler(item):
        return "scheduler"
    return None


def is_scheduler(item: Any) -> bool:
    """Whether an object is a learning-rate scheduler: torch's, DeepSpeed's, or a `DummyScheduler`."""
    if isinstance(item, (torch.optim.lr_scheduler.LRScheduler, DummyScheduler)):
        return True
    return type(item).__name__ in OF_DEEPSPEED


def check_model_and_optimizer(model: nn.Module, optimizer: Any, config: Mapping[str, Any]) -> None:
    """Check that a model comes with its optimizer where ZeRO shards optimizer states, and that the two belong together.

    Args:
        model: The model.
        optimizer: The optimizer prepared with it, if any.
        config: The DeepSpeed configuration.

    Raises:
        ValueError: They do not; the message says what to pass instead.
    """
    stage = get_value(config, "zero_optimization.stage", 0)
    if optimizer is None and stage in (1, 2) and "optimizer" not in config:
        raise ValueError(
            f"prepare() got the model {type(model).__name__} without an optimizer, but ZeRO stage {stage} shards the "
            "optimizer's state. Pass both to one call of prepare(). For inference only, choose stage 3 or 0."
        )
    if stage == 0 or not isinstance(optimizer, torch.optim.Optimizer):
        return
    known = {id(one) for one in model.parameters()}
    num_foreign = sum(id(one) not in known for group in optimizer.param_groups for one in group["params"])
    if num_foreign:
        raise ValueError(
            f"{num_foreign} parameters of the optimizer {type(optimizer).__name__} do not belong to the model "
            f"{type(model).__name__} that is prepared with it. Create the optimizer from model.parameters()."
        )


def check_fit(optimizer: Any, scheduler: Any, config: Mapping[str, Any]) -> None:
    """Check that optimizer and scheduler are each defined once: by an object or by the configuration.

    Args:
        optimizer: The optimizer to prepare, if any.
        scheduler: The scheduler to prepare, if any.
        config: The DeepSpeed configuration.

    Raises:
        ValueError: One is defined twice or not at all; the message says what to change.
    """
    for kind, item, dummy in (("optimizer", optimizer, DummyOptim), ("scheduler", scheduler, DummyScheduler)):
        if item is None:
            continue
        is_dummy, is_described = isinstance(item, dummy), kind in config
        if is_described and not is_dummy:
            raise ValueError(
                f"The {kind} is given twice: the DeepSpeed configuration has a section {kind!r}, and prepare() got a "
                f"{type(item).__name__}. Remove the section, or pass accelerate.utils.{dummy.__name__} instead."
            )
        if is_dummy and not is_described and getattr(item, "lr_scheduler_callable", None) is None:
            instead = ", or pass lr_scheduler_callable to it" if dummy is DummyScheduler else ""
            raise ValueError(
                f"prepare() got a {dummy.__name__}, which stands for the {kind} of the DeepSpeed configuration, but it "
                f"has no section {kind!r}. Add one, or pass a real {kind}{instead}."
            )
    if isinstance(optimizer, DummyOptim) and scheduler is not None and not isinstance(scheduler, DummyScheduler):
        raise ValueError(
            f"prepare() got a DummyOptim together with the scheduler {type(scheduler).__name__}, but the optimizer of "
            "that scheduler is created by DeepSpeed only now. Pass a DummyScheduler, with a section 'scheduler' in the "
            "configuration or with lr_scheduler_callable."
        )
