"""What torchdata's `StatefulDataLoader` leaves to its user: random numbers in time, and persistent workers at an epoch's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

SNAPSHOT = "_snapshot"
MAIN = "_main_snapshot"
WORKERS = "_worker_snapshots"
"""The keys of torchdata's state where there are workers."""


class _CallsOnce:
    """An iterator over indices that calls a function once the first of them is drawn.

    Args:
        reader: torchdata's iterator, which gets its own `_sampler_iter` back then.
        function: What to call.
    """

    def __init__(self, reader: Any, function: Callable[[], object]) -> None:
        self._reader = reader
        self._function = function
        self._indices = reader._sampler_iter

    def __iter__(self) -> _CallsOnce:
        return self

    def __next__(self) -> Any:
        self._reader._sampler_iter = self._indices
        index = next(self._indices)
        self._function()
        return index


def call_before_reading(reader: Iterator[Any], function: Callable[[], object]) -> None:
    """Have a function called between drawing the first indices and reading their samples.

    Args:
        reader: An iterator of a `StatefulDataLoader` without workers that has just been created, which does both in one call.
        function: What to call, once.
    """
    iterator: Any = reader
    iterator._sampler_iter = _CallsOnce(iterator, function)


def saved_workers(state: Any) -> int | None:
    """How many workers the loader had whose state this is; None if it is no state of torchdata's."""
    if not isinstance(state, dict):
        return None
    if "_num_yielded" in state:
        return 0
    count: int | None = state.get(SNAPSHOT, {}).get(MAIN, {}).get("_num_workers")
    return count


def check_position(state: dict[str, Any], loader: Any) -> None:
    """Raise an error for a state that torchdata would not load.

    Args:
        state: torchdata's; an empty one is none.
        loader: The `StatefulDataLoader`.

    Raises:
        ValueError: It is no state of torchdata's, or was saved within an epoch with another number of workers.
    """
    count = saved_workers(state)
    if state and count is None:
        raise ValueError(
            f"A dictionary with the keys {sorted(map(str, state))} is not the position of a data loader. Load what its "
            "state_dict() returned."
        )
    if state and count != loader.num_workers and not state.get("_iterator_finished"):
        raise ValueError(
            f"The position was saved within an epoch that {count} workers read, and this data loader has "
            f"num_workers={loader.num_workers}. torchdata continues an epoch with as many workers only: set "
            f"num_workers={count}, at least until the epoch is over."
        )


def reads_from_start(loader: Any) -> bool:
    """Whether the workers of a loader read a stream from its start again, to continue an epoch.

    Args:
        loader: A `DataLoader`; one of torchdata's does not where the stream, or its iterator, has a state.
    """
    if not isinstance(loader.dataset, IterableDataset):
        return False
    position = getattr(loader, "next_iter_state", None) or {}
    workers = position.get(SNAPSHOT, {}).get(WORKERS, {}).values()
    return not any(_has_state(worker) for worker in workers)


def _has_state(worker: dict[str, Any]) -> bool:
    """Whether a worker's stream, or its iterator, had a state to store."""
    fetcher = worker.get("fetcher_state") or {}
    return worker.get("dataset_state") is not None or fetcher.get("dataset_iter_state") is not None


def with_last_worker_states(state: dict[str, Any], loader: Any) -> dict[str, Any]:
    """The state of a loader at an epoch's end, with those of its workers once they have ended their streams.

    torchdata's own is from the last batch, before some of them were asked for more. Persistent workers begin the next epoch
    with what that changed.

    Args:
        state: What `loader.state_dict()` returned.
        loader: The `StatefulDataLoader`.
    """
    if not loader.num_workers or not loader.persistent_workers or SNAPSHOT not in state:
        return state
    states = {name: worker.get_state() for name, worker in loader._iterator._worker_snapshots.items()}
    return {**state, SNAPSHOT: {**state[SNAPSHOT], WORKERS: states}}


def next_epoch_state(state: dict[str, Any], dataset: Any) -> dict[str, Any]:
    """The state from which new persistent workers begin an epoch as those would have that were alive at the last one's end.

    torchdata resumes at the end, and has the workers read ahead from there before it begins the epoch, so that streams with
    a state lose the samples that were read.

    Args:
        state: The state at the end, of a loader with workers.
        dataset: That of the loader.
    """
    snapshot = state[SNAPSHOT]
    main = snapshot[MAIN] | {"_sampler_iter_yielded": 0, "_sampler_iter_state": None}
    workers = {name: _before_iterating(worker, dataset) for name, worker in snapshot[WORKERS].items()}
    begun = {
        "_snapshot_step": 0,
        "_last_yielded_worker_id": main["_num_workers"] - 1,
        MAIN: main,
        WORKERS: workers,
    }
    return state | {SNAPSHOT: snapshot | begun, "_steps_since_snapshot": 0, "_iterator_finished": False}


def _before_iterating(worker: dict[str, Any], dataset: Any) -> dict[str, Any]:
    """A worker's state without its iterator; of a stream that is its own iterator, the stream has the state."""
    fetcher = worker.get("fetcher_state")
    if fetcher is None:
        return worker
    dataset_state = worker.get("dataset_state")
    if dataset_state is None and callable(getattr(dataset, "load_state_dict", None)):
        dataset_state = fetcher["dataset_iter_state"]
    return worker | {
        "dataset_state": dataset_state,
        "fetcher_state": {"dataset_iter_state": None, "fetcher_ended": False},
    }
