"""Continuing an epoch after `load_state` alone: how much of it is done, and whether a loader continues it.

Programs for accelerate 1.15 skip batches themselves after `load_state`. `skip_first_batches` says so; a loop that draws
batches and drops them until it is where it was shows it by its first draws, and gets the batches that it counts on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import IterableDataset

from accel_data.split_stream import SplitStream
from accel_ops.nested import recursively_apply
from accel_state.logging import get_logger
from accel_state.processes import PartialState
from accel_state.warning import warn_user

logger = get_logger(__name__)

DRAWS_THAT_SHOW = 2
"""After so many batches that were drawn and dropped without a forward pass, the program is skipping by hand."""


@dataclass(frozen=True)
class Position:
    """How much of an epoch is done, as a checkpoint stores it.

    Attributes:
        batches: The number of batches that were yielded on each process.
        global_batch_size: Samples of one batch over all processes; None where it is unknown.
        num_processes: How many processes there were.
        num_samples: The length of the dataset; None for streams.
        num_workers: The worker processes that read; None where they are unknown.
    """

    batches: int
    global_batch_size: int | None = None
    num_processes: int | None = None
    num_samples: int | None = None
    num_workers: int | None = None

    @classmethod
    def of(cls, loader: Any, batches: int) -> Position:
        """The position of a prepared loader after so many batches of its epoch."""
        return cls(
            batches,
            _global_batch_size(loader),
            PartialState().num_processes,
            _num_samples(loader),
            getattr(loader, "num_workers", None),
        )

    @property
    def batch_size(self) -> int | None:
        """Samples of one batch of one process; None where it is unknown."""
        return None if self.global_batch_size is None else self.global_batch_size // (self.num_processes or 1)

    def state_dict(self) -> dict[str, int | None]:
        """The attributes, as plain data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """The position that `state_dict` described.

        Raises:
            ValueError: It describes none.
        """
        names = [field.name for field in fields(cls)]
        values = [state.get(name) for name in names] if isinstance(state, dict) else [None]
        if type(values[0]) is not int or values[0] < 0 or {type(value) for value in values} - {int, type(None)}:
            raise ValueError(f"{state!r} is not the position of a data loader. Load another checkpoint.")
        return cls(*values)


class Resumption:
    """An epoch that a checkpoint was saved in, until the loader continues it or begins another one.

    Args:
        position: Where it was left.
        models: The prepared models, whose use tells training from other loops.
    """

    def __init__(self, position: Position, models: Sequence[nn.Module] = ()) -> None:
        self.position = position
        self._models = models
        self._were_training = _any_training(models)

    def __getstate__(self) -> dict[str, Any]:
        """Without the models, so that copying a loader does not copy them."""
        return {"position": self.position, "_models": (), "_were_training": False}

    def batches_to_skip(self, loader: Any) -> int:
        """How many batches of the epoch that begins now were yielded before the checkpoint was saved.

        Args:
            loader: The prepared loader, set to that epoch.

        Returns:
            Their number on each process, for the global batch size of this run; 0 in loops that do not train: within
            `torch.no_grad()`, or with models in eval mode which were not when the checkpoint was loaded.
        """
        if not torch.is_grad_enabled() or (self._were_training and not _any_training(self._models)):
            return 0
        now, saved = Position.of(loader, 0), self.position
        if now.num_samples != saved.num_samples:
            warn_user(
                f"The checkpoint was saved within an epoch of {saved.num_samples} samples, and this data loader has "
                f"{now.num_samples}: it begins with a full epoch."
            )
            return 0
        return _converted(saved, now, loader)

    def follow(self, batches: Iterator[Any], loader: Any, skipped: int) -> Iterator[Any]:
        """Yield the batches of a continued epoch, unless the program turns out to skip batches by hand.

        Then it has counted from the epoch's start: it is given other batches to drop until it arrives at `skipped`, and
        these batches from there on.

        Args:
            batches: The batches after the skipped ones.
            loader: The loader that reads them.
            skipped: The number of those left out.
        """
        if not self._models:  # a program that only reads
            yield from batches
            return
        was_used = _FirstForward()
        kept: list[Any] = []
        first: Any = None
        try:
            for batch in batches:
                if not was_used.happened and len(kept) < DRAWS_THAT_SHOW:
                    kept.append(recursively_apply(torch.clone, batch))
                    first = _reference(batch) if first is None else first
                elif kept:
                    if not was_used.happened and _is_gone(first):
                        yield from self._for_counting(kept, loader, skipped)
                        loader.epoch_order.batches += 1  # the one read ahead
                    was_used.happened, kept = True, []
                yield batch
            if not was_used.happened and _is_gone(first):
                yield from self._for_counting(kept, loader, skipped)
        finally:
            was_used.forget()

    def _for_counting(self, kept: list[Any], loader: Any, skipped: int) -> Iterator[Any]:
        """Batches to drop until `skipped` have been drawn, then those that were drawn too early."""
        warn_user(
            f"After load_state() this data loader continues at batch {skipped} of its epoch by itself, and the program "
            f"drops {skipped} batches, too: it gets the others now. Use skip_first_batches(loader, {skipped}), or do not skip."
        )
        at_end, loader.end_of_dataloader = loader.end_of_dataloader, False
        loader.epoch_order.batches = len(kept)
        for _ in range(skipped - len(kept)):
            loader.epoch_order.batches += 1
            yield kept[0]
        for index, batch in enumerate(kept):
            loader.end_of_dataloader = at_end and index == len(kept) - 1
            loader.epoch_order.batches += 1
            yield batch
        loader.end_of_dataloader = at_end


class _FirstForward:
    """Whether any module with parameters has been called since, as a training step does and skipping does not."""

    def __init__(self) -> None:
        self.happened = False
        self._handle: Any = register_module_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, _: Any) -> None:
        if next(module.parameters(), None) is not None:  # not a transform of samples
            self.happened = True
            self.forget()

    def forget(self) -> None:
        """Remove the hook."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


def _converted(saved: Position, now: Position, loader: Any) -> int:
    """How many batches of this run hold the samples that were yielded."""
    if isinstance(loader.dataset, SplitStream) and saved.num_processes != now.num_processes:
        warn_user(
            f"The checkpoint was saved within an epoch of a stream that is sharded at its source, by {saved.num_processes} "
            f"processes, and {now.num_processes} load it: their shards differ, so each begins with a full epoch."
        )
        return 0
    if saved.global_batch_size is None or now.global_batch_size is None:
        done, size = saved.batches * (saved.num_processes or 1), now.num_processes or 1
    else:
        done, size = saved.batches * saved.global_batch_size, now.global_batch_size
    count, again = divmod(done, size)
    if again:
        warn_user(
            f"The checkpoint was saved after {done} samples of an epoch, which is no multiple of this run's global batch "
            f"size of {size}: the last {again} of them come again. Choose a batch size per process so that it is one."
        )
    if count and isinstance(loader.dataset, IterableDataset):
        _warn_of_another_order(saved, now)
        logger.warning(
            "The first %d batches of the epoch are read again and dropped, because a stream can only be read from its start.",
            count,
        )
    return count


def _warn_of_another_order(saved: Position, now: Position) -> None:
    """Warn if a stream that workers share out comes in another order now: they take turns, with a whole batch each."""
    if saved.num_workers is None or now.num_workers is None or max(saved.num_workers, now.num_workers) < 2:
        return
    if (saved.num_workers, saved.batch_size) != (now.num_workers, now.batch_size):
        warn_user(
            f"The checkpoint was saved within an epoch of a stream with num_workers={saved.num_workers} and "
            f"{saved.batch_size} samples per batch, and this data loader has num_workers={now.num_workers} and "
            f"{now.batch_size}: if workers share out the stream, its order is another now, so that some samples come again and "
            "others are left out. Use the same until the epoch is over."
        )


def _global_batch_size(loader: Any) -> int | None:
    try:
        return int(loader.total_batch_size)
    except (AttributeError, TypeError):  # a batch sampler without batch_size, or no batches at all
        return None


def _num_samples(loader: Any) -> int | None:
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return int(loader.total_dataset_length)
    except (AttributeError, TypeError):
        return None


def _any_training(models: Sequence[nn.Module]) -> bool:
    return any(model.training for model in models)


def _reference(batch: Any) -> weakref.ref[torch.Tensor] | None:
    """A weak reference to the first tensor of a batch; None where there is none."""
    leaves: list[torch.Tensor] = []
    recursively_apply(leaves.append, batch)
    return weakref.ref(leaves[0]) if leaves else None


def _is_gone(reference: weakref.ref[torch.Tensor] | None) -> bool:
    return reference is not None and reference() is None
