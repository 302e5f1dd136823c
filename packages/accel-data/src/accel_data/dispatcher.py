"""A loader of which only the first process reads; the others are sent their shares."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from accel_data.batch_scatter import BatchScatter, ScatteredBatch
from accel_data.prepared_loader import PreparedLoader
from accel_data.samplers import batch_sampler_of
from accel_ops.batches import concatenate, find_batch_size, ignorant_find_batch_size, slice_tensors
from accel_ops.nested import flatten
from accel_ops.placement import send_to_device
from accel_ops.random import synchronize_rng_states
from accel_state.mesh import SAME_BATCH_AXES
from accel_state.processes import PartialState
from accel_state.public_names import known_as
from accel_state.supervision import report_progress


@known_as("accelerate.data_loader.DataLoaderDispatcher")
class DataLoaderDispatcher(PreparedLoader):
    """Reads batches on the first process and sends every process its share.

    A round is one batch per process, or one batch cut into shares with `split_batches`. A last round that does not
    divide evenly is filled up with the first samples, unless `_drop_last` leaves it out. Batches of a round whose rows
    differ in length are not joined: each process gets one. A last batch whose rows are not as long as the first ones is
    filled up with its own samples.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        split_batches (`bool`): Cut each batch instead of reading one for each process.
        skip_batches (`int`): How many rounds to read without handing them out.
        use_stateful_dataloader (`bool`): Read through torchdata's `StatefulDataLoader`.
        slice_fn (*optional*): Cuts a batch, called as `slice_fn(batch, slice, process_index=..., num_processes=...)`.
        torch_device_mesh (*optional*): Processes that differ only along tensor, context or sequence axes of it get the
            same share.
        iteration (`int`): The epoch of the next iteration.
        kwargs: For `torch.utils.data.DataLoader`.
    """

    keeps_first: Any = None
    """A `SkipBatchSampler` that knows the first batches of an epoch, also where an iteration begins after them."""

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            drop_last=_drop_last,
            non_blocking=_non_blocking,
            skip_batches=skip_batches,
            iteration=iteration,
            use_stateful_dataloader=use_stateful_dataloader,
            loader_arguments=kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self.torch_device_mesh = torch_device_mesh
        self.state = PartialState()

    def _synchronize(self) -> Callable[[], None] | None:
        # one generator state for all, because each process may draw numbers of its own in between
        synchronize_rng_states(["torch"])
        return None

    def _batches(self, settle: Callable[[], None] | None) -> Iterator[Any]:
        state = self.state
        shares: Iterator[ScatteredBatch]
        if state.num_processes == 1:
            shares = self._read_alone(settle)
        elif state.process_index == 0:
            shares = self._read_and_send(BatchScatter(state), settle)
        else:
            shares = iter(BatchScatter(state).receive, None)
            if settle is not None:
                settle()
        for index, share in enumerate(shares):
            report_progress()
            batch = send_to_device(share.batch, state.device, non_blocking=self._non_blocking)
            if share.is_last:
                self.end_of_dataloader = self.epoch_order.at_end = True
                self.remainder = share.num_samples
            if index >= self.skip_batches:
                yield batch
            if share.is_last:
                return

    def _read_alone(self, settle: Callable[[], None] | None) -> Iterator[ScatteredBatch]:
        for current, is_last in self._read_ahead(settle):
            yield ScatteredBatch(current[0], is_last, ignorant_find_batch_size(current[0]) or 0)

    # ---- the first process --------------------------------------------------------------------------------------

    def _read_and_send(self, rounds: BatchScatter, settle: Callable[[], None] | None) -> Iterator[ScatteredBatch]:
        places = self._places()
        num_shares = len(set(places))
        first: Any = None
        with rounds:
            ahead = self._read_ahead(settle)
            while True:
                with rounds.errors_for_all():
                    current, is_last = next(ahead, (None, True))
                    if current is None:
                        cut = None
                    elif rows_differ(current):
                        cut = deal_out(current, num_shares, is_last, self._drop_last)
                        num_samples = sum(find_batch_size(batch) or 0 for batch in current)
                    else:
                        joined = concatenate(current) if len(current) > 1 else current[0]
                        first = self._beginning(joined, first)
                        cut, num_samples = self._cut(joined, first, num_shares, is_last)
                if cut is None:
                    rounds.send_end()
                    return
                yield rounds.send([cut[place] for place in places], is_last, num_samples)
                if is_last:
                    return

    def _read_ahead(self, settle: Callable[[], None] | None) -> Iterator[tuple[list[Any], bool]]:
        """The batches of one round after the other, and whether they are the last: the next ones are read before.

        A stateful loader shows the position of the round that is yielded meanwhile, or its end after the last one.
        """
        reader = self._read_rounds()
        current = next(reader, None)
        for index in itertools.count():
            position = self._position()
            if settle is not None and (index == self.skip_batches or current is None):
                settle()
                settle = None
            if current is None:
                return
            following = next(reader, None)
            ahead = self._position()
            self._show_position(position if following is not None else ahead)
            yield current, following is None
            self._show_position(ahead)
            current = following

    @property
    def keeps_position(self) -> bool:
        """Whether this process knows how far it has come within an epoch: only the one that reads does."""
        return self.use_stateful_dataloader and self.state.process_index == 0

    def _position(self) -> Any:
        """Where the base loader stands; only a stateful one knows."""
        return self.dl_state_dict if self.use_stateful_dataloader else None

    def _show_position(self, position: Any) -> None:
        if self.use_stateful_dataloader:
            self.dl_state_dict = position

    def _read_rounds(self) -> Iterator[list[Any]]:
        """The batches of one round after the other."""
        per_round = 1 if self.split_batches else len(set(self._places()))
        waiting: list[Any] = []
        for batch in self.base_dataloader:
            self._update_state_dict(finished=False)
            waiting.append(batch)
            if len(waiting) == per_round:
                yield waiting
                waiting = []
        self._update_state_dict(finished=True)
        if waiting and not (self._drop_last and len(waiting) < per_round):
            yield waiting

    def _first_of_epoch(self, first: Any) -> Any:
        """The samples that the epoch began with, where this iteration began after them; `first` otherwise."""
        batches = self.keeps_first.kept if self.epoch_start.is_mid_epoch and self.keeps_first is not None else []
        if not batches:
            return first
        collate, dataset = self.collate_fn, self.dataset
        are_lists = self.base_dataloader.batch_sampler is None  # of a sampler that yields batches
        read = [collate(dataset[batch] if are_lists else [dataset[index] for index in batch]) for batch in batches]
        return self._beginning(concatenate(read) if len(read) > 1 else read[0], None)

    def _beginning(self, data: Any, first: Any) -> Any:
        """The first samples, to fill the last round up with."""
        if first is not None or self._drop_last:
            return first
        count = self.state.num_processes
        return self.slice_fn(data, slice(0, count), process_index=self.state.process_index, num_processes=count)

    def _cut(self, data: Any, first: Any, count: int, is_last: bool) -> tuple[list[Any] | None, int]:
        """The shares, and how many samples are real; None when there is nothing (more) to share out."""
        num_samples = find_batch_size(data) or 0
        size, left = divmod(num_samples, count)
        if left and is_last:
            if self._drop_last and size == 0:
                return None, 0
            if not self._drop_last:
                first = self._first_of_epoch(first)
                filler = data if rows_differ([data, first]) else first
                while (find_batch_size(data) or 0) < (size + 1) * count:
                    data = concatenate([data, filler])
                size += 1
            left = 0
        elif size == 0:
            raise ValueError(
                f"A round of {num_samples} samples in the middle of the data cannot be shared out between {count} "
                "processes: let the batch sampler yield at least one sample for each process, short batches last."
            )
        # a round that does not divide evenly, and is not the last, gives the first processes one sample more
        ends = [place * size + min(place, left) for place in range(count + 1)]
        cut = [
            self.slice_fn(data, slice(ends[place], ends[place + 1]), process_index=place, num_processes=count)
            for place in range(count)
        ]
        return cut, num_samples

    def _places(self) -> list[int]:
        """Which share each process gets."""
        if self.torch_device_mesh is None:
            return list(range(self.state.num_processes))
        return _places_in(self.torch_device_mesh)

    # ---- sizes --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        whole = len(self.base_dataloader)
        if self.split_batches:
            return whole
        count = len(set(self._places()))
        return whole // count if self._drop_last else -(-whole // count)

    @property
    def total_batch_size(self) -> int:
        """Samples of one round."""
        size: int = getattr(batch_sampler_of(self), "batch_size", None) or self.batch_size or 1
        return size if self.split_batches else size * len(set(self._places()))


def _places_in(mesh: Any) -> list[int]:
    """The data index of every rank of a mesh."""
    names = list(mesh.mesh_dim_names or ())
    sharing = [axis for axis, name in enumerate(names) if name in SAME_BATCH_AXES]
    grid = torch.as_tensor(mesh.mesh)
    data_axes = [axis for axis in range(grid.ndim) if axis not in sharing]
    ordered = grid.permute(*data_axes, *sharing).reshape(-1, max(1, _product(grid, sharing)))
    places = [0] * grid.numel()
    for index, row in enumerate(ordered.tolist()):
        for rank in row:
            places[rank] = index
    return places


def _product(grid: torch.Tensor, axes: list[int]) -> int:
    size = 1
    for axis in axes:
        size *= grid.shape[axis]
    return size


def rows_differ(batches: Sequence[Any]) -> bool:
    """Whether batches of the same structure hold rows of different shapes, as padding to the longest row makes them.

    Args:
        batches: Nested tensors of shape (samples, ...).
    """
    if len(batches) == 1:
        return False
    shapes, structures = set(), set()
    for batch in batches:
        leaves, structure = flatten(batch, "the dispatching data loader")
        structures.add(structure)
        shapes.add(tuple(leaf.shape[1:] for leaf in leaves))
    return len(structures) == 1 and len(shapes) > 1


def deal_out(batches: Sequence[Any], count: int, is_last: bool, drop_last: bool) -> list[Any] | None:
    """One batch for each of `count` processes.

    In the last round a short batch is filled up with its own samples and a missing one replaced by the first, so that
    the real samples come first; with `drop_last` all are cut to the shortest instead.

    Args:
        batches: Those of the round, nested tensors; fewer than `count` only in the last round.
        count: Processes.
        is_last: Whether the data end with this round.
        drop_last: Leave out what would have to be filled up.

    Returns:
        The batches, or None when nothing is left of the round.

    Raises:
        ValueError: When a batch before the last one is short, so that filling up would mix real and repeated samples.
    """
    sizes = [find_batch_size(batch) or 0 for batch in batches]
    if not is_last or (len(batches) == count and len(set(sizes)) == 1):
        return list(batches)
    if drop_last:
        return [slice_tensors(batch, slice(0, min(sizes))) for batch in batches] if len(batches) == count else None
    size = sizes[0]
    if any(other != size for other in sizes[:-1]) or sizes[-1] > size:
        raise ValueError(
            f"The last round has batches of {sizes} samples whose rows differ in length, so they cannot be joined and "
            "shared out evenly: let only the very last batch be short, or pad all batches to one length."
        )
    whole = concatenate([batches[-1]] * -(-size // sizes[-1]))
    dealt = [*batches[:-1], slice_tensors(whole, slice(0, size))]
    return dealt + [batches[0]] * (count - len(dealt))
