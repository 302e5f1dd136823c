"""Data loaders in a rehearsal: samples are read with values, and batches come without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from accel_cli.rehearse.recording import Recorder
from accel_cli.rehearse.skipping import note_once
from accel_data.prepared_loader import PreparedLoader

END = object()
IN_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context", "worker_init_fn")


class Batches:
    """Turns the loaders of a script into those of a rehearsal.

    Args:
        recorder: Told of each batch.
        notes: Gets a line if an evaluation is skipped.
        repeats_first: Whether all batches are like the first one, which alone is read.

    Attributes:
        size: The size of a batch in dimension 0; None before the first one.
    """

    def __init__(self, recorder: Recorder, notes: list[str], repeats_first: bool = False) -> None:
        self.size: int | None = None
        self._notes = notes
        self._recorder = recorder
        self._repeats_first = repeats_first
        self._is_reading = False

    def resize(self, size: int) -> None:
        """From now on, give batches of another size, like the first one otherwise."""
        self.size, self._repeats_first = size, True

    def iterator(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """Make the `__iter__` of a class of loaders."""

        def batches(loader: Any) -> Iterator[Any]:
            if self._is_reading:  # a loader inside of another one
                return iter(original(loader))
            return self._read(original, loader)

        return batches

    def _read(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        if self._recorder.is_evaluating:
            note_once(self._notes, "skipped: evaluation, the loops over loaders while models are in evaluation mode")
            return
        with self._with_values():
            source = iter(original(loader))
        batch: Any = None
        while True:
            if batch is None or not self._repeats_first:
                with self._with_values():
                    batch = next(source, END)
            if batch is END:
                return
            leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
            read = leaves[0].shape[0] if leaves else 0
            if not self._repeats_first or self.size is None:
                self.size = read
            token_ids = next((leaf for leaf in leaves if leaf.ndim == 2 and not leaf.dtype.is_floating_point), None)
            num_tokens = [] if token_ids is None else [token_ids.shape[1]]
            self._recorder.begin_batch([self.size, *num_tokens] if leaves else [])
            yield tree_map_only(torch.Tensor, partial(self._rehearsed, read), batch)

    def _rehearsed(self, read: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of a batch as the script gets it: of the current size, and without values unless the run has some."""
        is_resized = tensor.ndim > 0 and tensor.shape[0] == read and self.size not in (None, read)
        if detect_fake_mode() is None and not is_resized:
            return tensor
        if is_resized:
            return torch.zeros(self.size or 0, *tensor.shape[1:], dtype=tensor.dtype)
        if isinstance(tensor, FakeTensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    @contextmanager
    def _with_values(self) -> Iterator[None]:
        self._is_reading = True
        try:
            with unset_fake_temporarily():
                yield
        finally:
            self._is_reading = False


@contextmanager
def rehearsed_batches(batches: Batches) -> Iterator[None]:
    """A context in which loaders read in this process, and give what `batches` makes of it."""
    make = DataLoader.__init__

    def make_without_workers(loader: Any, *args: Any, **kwargs: Any) -> None:
        make(
            loader,
            *args,
            **({name: value for name, value in kwargs.items() if name not in IN_WORKERS} | {"num_workers": 0}),
        )

    with ExitStack() as stack:
        for kind in (DataLoader, PreparedLoader):
            stack.enter_context(patch.object(kind, "__iter__", batches.iterator(kind.__iter__)))
        stack.enter_context(patch.object(DataLoader, "__init__", make_without_workers))
        yield
