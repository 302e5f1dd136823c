"""A loader that only the main process reads; it scatters the batches to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from accel_data.batch_scatter import BatchScatter, ScatteredBatch
from accel_data.device_copies import make_copies
from accel_data.prepared_loader import OpenEpoch, PreparedLoader, Reading
from accel_data.sample_columns import ProgramSlices, SampleColumns, pad_ragged
from accel_data.samplers import End, SkipBatchSampler, batch_sampler_of
from accel_ops.batches import ignorant_find_batch_size, slice_tensors
from accel_ops.nested import flatten, rebuild
from accel_ops.random import synchronize_rng_states
from accel_state.mesh_axes import SAME_BATCH_AXES
from accel_state.processes import PartialState
from accel_state.public_names import known_as

CPU = torch.device("cpu")


@known_as("accelerate.data_loader.DataLoaderDispatcher")
class DataLoaderDispatcher(PreparedLoader):
    """Reads batches on the main process and sends every process its local batch.

    A global batch is made of one batch per process, or is one batch sliced into local ones with `split_batches`. A last
    one that does not divide evenly is padded with the first samples of the epoch, unless `_drop_last` leaves it out.
    Batches whose rows differ in length are not concatenated: each process gets one. A last batch whose rows are not as
    long as the first ones is padded with its own samples.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        split_batches (`bool`): Slice each batch instead of reading one for each process.
        skip_batches (`int`): The number of global batches that are read and not yielded.
        use_stateful_dataloader (`bool`): Continue by itself an epoch that a checkpoint was saved in.
        slice_fn (*optional*): Slices a global batch, called as `slice_fn(batch, slice, process_index=..., num_processes=...)`.
        torch_device_mesh (*optional*): Ranks that differ only along its tensor, context or sequence dimension get the
            same local batch.
        iteration (`int`): The epoch of the next iteration.
        kwargs: For `torch.utils.data.DataLoader`.
    """

    keeps_first: Any = None
    """A `SkipBatchSampler` that keeps the first batches of an epoch, even if an iteration starts after them."""

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
        self._samples = self._splitter()
        self._first: Any = None
        self._first_indices: SkipBatchSampler | None = None
        self._is_mid_epoch = False

    @override
    def _rest_with(self, arguments: dict[str, Any]) -> DataLoaderDispatcher:
        rest = DataLoaderDispatcher(
            self.dataset,
            split_batches=self.split_batches,
            slice_fn=self.slice_fn,
            torch_device_mesh=self.torch_device_mesh,
            **arguments,
        )
        rest.keeps_first, sampler = self.keeps_first, batch_sampler_of(rest)
        if rest.keeps_first is None and isinstance(sampler, SkipBatchSampler):
            sampler.keep_first(self.reads_per_batch)
            rest.keeps_first = sampler
        return rest

    @override
    def _synchronize(self) -> Callable[[], object] | None:
        # synchronize the generator state, because each process may draw its own numbers in between
        synchronize_rng_states(["torch"])
        return None

    @override
    def _open(self, reading: Reading) -> OpenEpoch:
        state = self.state
        # sequences are sharded in CPU memory: less to move, and reading them does not wait for the device
        target = state.device if self.sequence_shard is None else CPU
        scattered: Iterator[ScatteredBatch]
        if state.num_processes == 1:
            scattered = self._read_alone(reading)
        elif state.process_index == 0:
            scattered = self._read_and_send(BatchScatter(state, target), reading)
        else:
            scattered = iter(BatchScatter(state, target).receive, None)
            if reading.order_drawn is not None:
                reading.order_drawn()
        copies, shard = make_copies(state.device, self._non_blocking), self.sequence_shard

        def finish(local: ScatteredBatch) -> Any:
            return copies.finish(copies.start(local.batch if shard is None else shard(local.batch)))

        end = End()
        return _until_last(scattered, end), end, finish

    @override
    def _end_reached(self, item: ScatteredBatch) -> None:
        super()._end_reached(item)
        self.remainder = item.num_samples

    def _read_alone(self, reading: Reading) -> Iterator[ScatteredBatch]:
        read, end = self._read(reading)
        for number, batches in enumerate(read, 1):
            yield ScatteredBatch(batches[0], number == end.num_batches, ignorant_find_batch_size(batches[0]) or 0)

    # ---- the main process ---------------------------------------------------------------------------------------

    def _read_and_send(self, scatter: BatchScatter, reading: Reading) -> Iterator[ScatteredBatch]:
        data_ranks = self._data_ranks()
        num_shards = len(set(data_ranks))
        self._samples, self._first = self._splitter(), None
        self._is_mid_epoch, self._first_indices = reading.is_mid_epoch, self._kept_indices(reading.source)
        with scatter:
            with scatter.errors_for_all():
                read, end = self._read(reading)
            for number in count(1):
                with scatter.errors_for_all():
                    batches = next(read, None)
                    is_last = number == end.num_batches
                    local_batches, num_samples = (
                        (None, 0) if batches is None else self._local_batches(batches, num_shards, is_last)
                    )
                if local_batches is None:
                    scatter.send_end()
                    return
                yield scatter.send([local_batches[index] for index in data_ranks], is_last, num_samples)

    def _sizes(self, batches: list[Any]) -> list[int]:
        """The samples of each of the batches that make a global one; keeps the first samples of the epoch."""
        samples, kinds = self._samples, self._samples.kinds
        sizes = [samples.size(batch) for batch in batches]
        if kinds is not None and samples.kinds is not kinds:
            self._first = self.epoch.first_samples = None  # of another structure
        if self._first is None and not self._drop_last and not samples.rows_differ(batches):
            self._first = self._padding_samples(samples.join(batches))
        return sizes

    def _local_batches(self, batches: list[Any], num_shards: int, is_last: bool) -> tuple[list[Any] | None, int]:
        """The local batches of the batches that make a global one, and its samples without padding.

        Returns:
            None in place of the local batches when nothing is left of them.
        """
        samples, sizes = self._samples, self._sizes(batches)
        is_even = len(sizes) == num_shards and len(set(sizes)) == 1
        if is_even and not (self.split_batches or samples.splits_all):
            return batches, sum(sizes)  # each process gets a batch as it was read, whatever is in it
        if samples.rows_differ(batches):
            return pad_ragged(samples, batches, num_shards, is_last, self._drop_last), sum(sizes)
        return self._split(samples.join(batches), num_shards, is_last)

    @override
    def _drop(self, batch: Any) -> None:
        if batch is not None and self.state.num_processes > 1:
            self._sizes(batch)

    @property
    @override
    def keeps_position(self) -> bool:
        """Whether this process has torchdata's position: only the main process does, because it reads."""
        return super().keeps_position and self.state.process_index == 0

    @override
    def _grouped(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        num_batches = self.reads_per_batch
        waiting: list[Any] = []
        for batch in batches:
            waiting.append(batch)
            if len(waiting) == num_batches:
                yield waiting
                waiting = []
        if waiting and not self._drop_last:
            yield waiting

    @override
    def _source_after(self, num_batches: int) -> DataLoader[Any]:
        source = super()._source_after(num_batches)
        sampler: Any = batch_sampler_of(source)
        sampler.keep_first(self.reads_per_batch)
        return source

    def _kept_indices(self, source: Any) -> SkipBatchSampler | None:
        """What has the indices of the first samples of the epoch, though an iteration begins after them."""
        sampler = batch_sampler_of(source)
        reads_rest = source is not self.base_dataloader and isinstance(sampler, SkipBatchSampler)
        return sampler if reads_rest else self.keeps_first

    def _first_of_epoch(self, first: Any) -> Any:
        """The first samples of the epoch, if this iteration started after them; `first` otherwise."""
        first_batches = self._first_indices.kept if self._is_mid_epoch and self._first_indices is not None else []
        if not first_batches or self.epoch.first_samples is not None:
            return first
        collate, dataset = self.collate_fn, self.dataset
        are_lists = self.base_dataloader.batch_sampler is None  # of a sampler that yields batches
        read = [
            collate(dataset[batch] if are_lists else [dataset[index] for index in batch]) for batch in first_batches
        ]
        return self._slice_of_first(self._samples.join(read))

    def _splitter(self) -> SampleColumns | ProgramSlices:
        """What splits batches: by samples, whatever their structure, or by a function of the program."""
        if self.slice_fn is not slice_tensors:
            return ProgramSlices(self.slice_fn)
        return SampleColumns(self.batch_size or getattr(batch_sampler_of(self), "batch_size", None))

    def _padding_samples(self, data: Any) -> Any:
        """The first samples of the epoch, to pad the last global batch with; checkpoints hold them if they are nothing but tensors.

        Args:
            data: The first global batch of this iteration.
        """
        epoch, first = self.epoch, self._slice_of_first(data)
        try:
            leaves, _ = flatten(first, "the dispatching data loader")
        except TypeError:
            return first
        if epoch.first_samples is not None:
            return rebuild(first, epoch.first_samples)
        if isinstance(self.dataset, IterableDataset) or not self._is_mid_epoch:
            epoch.first_samples = [leaf.clone() for leaf in leaves]
        return first

    def _slice_of_first(self, data: Any) -> Any:
        count = self.state.num_processes
        return self._samples.part(data, 0, count, self.state.process_index, count)

    def _split(self, data: Any, count: int, is_last: bool) -> tuple[list[Any] | None, int]:
        """The local batches of a global one, and its samples without padding; None when nothing is left of it."""
        samples = self._samples
        num_samples = samples.size(data)
        size, left = divmod(num_samples, count)
        if left and is_last:
            if self._drop_last and size == 0:
                return None, 0
            if not self._drop_last:
                first = self._first_of_epoch(self._first)
                filler = data if samples.rows_differ([data, first]) else first
                while samples.size(data) < (size + 1) * count:
                    data = samples.join([data, filler])
                size += 1
            left = 0
        elif size == 0:
            raise ValueError(
                f"A global batch of {num_samples} samples in the middle of the data cannot be split over {count} "
                "processes. Let the batch sampler yield at least one sample for each process, and short batches last."
            )
        # a global batch that does not divide evenly, and is not the last, gives the first processes one sample more
        ends = [index * size + min(index, left) for index in range(count + 1)]
        return [samples.part(data, ends[index], ends[index + 1], index, count) for index in range(count)], num_samples

    def _data_ranks(self) -> list[int]:
        """The index of the local batch of each rank."""
        if self.torch_device_mesh is None:
            return list(range(self.state.num_processes))
        return _data_ranks_of(self.torch_device_mesh)

    @property
    @override
    def reads_per_batch(self) -> int:
        return 1 if self.split_batches else len(set(self._data_ranks()))

    # ---- sizes --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        num_batches = len(self.base_dataloader)
        if self.split_batches:
            return num_batches
        count = len(set(self._data_ranks()))
        return num_batches // count if self._drop_last else -(-num_batches // count)

    @property
    def total_batch_size(self) -> int:
        """Samples of one global batch."""
        size: int = getattr(batch_sampler_of(self), "batch_size", None) or self.batch_size or 1
        return size if self.split_batches else size * len(set(self._data_ranks()))


def _until_last(local_batches: Iterator[ScatteredBatch], end: End) -> Iterator[ScatteredBatch]:
    """The batches up to the one that says that it is the last, after which none is received."""
    for number, local in enumerate(local_batches, 1):
        if local.is_last:
            end.num_batches = number
        yield local
        if local.is_last:
            return


def _data_ranks_of(mesh: Any) -> list[int]:
    """The rank of every process of a mesh along its data-parallel dimensions."""
    names = list(mesh.mesh_dim_names or ())
    sharing = [axis for axis, name in enumerate(names) if name in SAME_BATCH_AXES]
    grid = torch.as_tensor(mesh.mesh)
    data_axes = [axis for axis in range(grid.ndim) if axis not in sharing]
    ordered = grid.permute(*data_axes, *sharing).reshape(-1, math.prod(grid.shape[axis] for axis in sharing))
    data_ranks = [0] * grid.numel()
    for index, row in enumerate(ordered.tolist()):
        for rank in row:
            data_ranks[rank] = index
    return data_ranks
