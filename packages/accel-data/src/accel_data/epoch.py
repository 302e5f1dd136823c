"""An epoch of a loader: where it began, what its order was drawn from, how far it is, and what its workers drew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_data.samplers import SeedableRandomSampler, batch_sampler_of, index_sampler, innermost
from accel_data.streams import SplitStream
from accel_data.workers import STATES_KEY, WorkerStates
from accel_ops.random import capture_cpu_rng_state, restore_rng_state
from accel_state.logging import get_logger
from accel_state.processes import PartialState
from accel_state.warning import warn_user

logger = get_logger(__name__)


@dataclass(frozen=True)
class EpochPosition:
    """How much of an epoch is done.

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
    def of(cls, loader: Any, batches: int) -> EpochPosition:
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
    def from_state(cls, state: Any) -> EpochPosition:
        """The position that `state_dict` described.

        Raises:
            ValueError: It describes none.
        """
        names = [field.name for field in fields(cls)]
        values = [state.get(name) for name in names] if isinstance(state, dict) else [None]
        if type(values[0]) is not int or values[0] < 0 or {type(value) for value in values} - {int, type(None)}:
            raise ValueError(f"{state!r} is not the position of a data loader. Load another checkpoint.")
        return cls(*values)

    def fits(self, loader: Any) -> bool:
        """Whether a prepared loader reads the same batches as the one whose position this is, in as many processes and workers."""
        return self == EpochPosition.of(loader, self.batches)

    def batches_in(self, loader: Any) -> int:
        """How many batches of a prepared loader hold the samples that were yielded.

        Args:
            loader: The loader; its global batch size may be another one than when the position was saved.

        Returns:
            Their number on each process; 0, with a warning, where the loader reads other data.
        """
        now = EpochPosition.of(loader, 0)
        if now.num_samples != self.num_samples:
            warn_user(
                f"The checkpoint was saved within an epoch of {self.num_samples} samples, and this data loader has "
                f"{now.num_samples}: it begins with a full epoch."
            )
            return 0
        if reads_own_shard(loader) and self.num_processes != now.num_processes:
            warn_user(
                f"The checkpoint was saved within an epoch of data that are sharded at their source, by {self.num_processes} "
                f"processes, and {now.num_processes} load it: their shards differ, so each begins with a full epoch."
            )
            return 0
        if self.global_batch_size is None or now.global_batch_size is None:
            done, size = self.batches * (self.num_processes or 1), now.num_processes or 1
        else:
            done, size = self.batches * self.global_batch_size, now.global_batch_size
        num_batches, again = divmod(done, size)
        if again:
            warn_user(
                f"The checkpoint was saved after {done} samples of an epoch, which is no multiple of this run's global batch "
                f"size of {size}: the last {again} of them come again. Choose a batch size per process so that it is one."
            )
        if num_batches and isinstance(loader.dataset, IterableDataset):
            self._warn_of_another_order(now)
            logger.warning(
                "The first %d batches of the epoch are read again and dropped, because a stream can only be read from its start.",
                num_batches,
            )
        return num_batches

    def _warn_of_another_order(self, now: EpochPosition) -> None:
        """Warn if a stream that workers share out comes in another order now: they take turns, with a whole batch each."""
        if self.num_workers is None or now.num_workers is None or max(self.num_workers, now.num_workers) < 2:
            return
        if (self.num_workers, self.batch_size) != (now.num_workers, now.batch_size):
            warn_user(
                f"The checkpoint was saved within an epoch of a stream with num_workers={self.num_workers} and "
                f"{self.batch_size} samples per batch, and this data loader has num_workers={now.num_workers} and "
                f"{now.batch_size}: if workers share out the stream, its order is another now, so that some samples come again "
                "and others are left out. Use the same until the epoch is over."
            )


def reads_own_shard(loader: Any) -> bool:
    """Whether the order of a loader is that of one process alone: its data were sharded at their source, or by the program."""
    return isinstance(loader.dataset, SplitStream) or getattr(loader, "num_own_shards", 1) > 1


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


TORCH_SAMPLERS = (SequentialSampler, RandomSampler, WeightedRandomSampler, SubsetRandomSampler, SeedableRandomSampler)
"""These draw from torch's generator or one of their own; others may draw from Python's or numpy's."""
OWN_ORDER_KEY = "own_order"
"""Of the states of an order that other processes do not share, among those of reading."""
RNG_KEYS = ("random_state", "numpy_random_seed", "torch_manual_seed")


@dataclass
class Rewound:
    """Random generators that were set back to the start of an epoch, until the order has been drawn again.

    Attributes:
        states: The earlier states of the process's generators.
        replaced_generators: Samplers that drew from torch's global generator when the epoch began, with the generator they
            have now.
    """

    states: dict[str, Any]
    replaced_generators: list[tuple[Any, torch.Generator]]

    def restore(self) -> None:
        """Restore the random states from before: call this once the first batch has been read."""
        restore_rng_state(self.states)
        for sampler, generator in self.replaced_generators:
            sampler.generator = generator


class Epoch:
    """The epoch that a loader reads, or was restored to.

    Shared by a loader and those that `skip_first_batches` makes from it, because they read the same epoch. Restored from
    a checkpoint, it lets the epoch be read in the same order, on any number of processes, and leaves the process's own
    random numbers where `load_state` set them.

    Attributes:
        start: The random states from which its order was drawn; None between epochs.
        number: Its number.
        batches: How many batches of it were yielded on this process; None while no loader is being iterated.
        at_end: True after its last batch was yielded.
        is_restored: True from loading a checkpoint made mid-epoch until an epoch begins.
        position: How much of it the checkpoint has seen, until a loader is iterated.
        reading: The random states from which a stream's batch after the last one yielded was read, in this process; empty
            where nothing is read ahead.
        workers: The random states of the workers of a loader that has some.
        first_samples: The leaves of its first samples, where this process pads the last batch of all with them.
    """

    def __init__(self) -> None:
        self.start: dict[str, Any] | None = None
        self.number = 0
        self.batches: int | None = None
        self.at_end = False
        self.is_restored = False
        self.position: EpochPosition | None = None
        self.reading: dict[str, Any] = {}
        self.workers = WorkerStates()
        self.first_samples: list[torch.Tensor] | None = None

    def begin(self, loader: Any) -> None:
        """Record the states from which a new epoch of `loader` is drawn."""
        from_torch = type(index_sampler(loader)) in TORCH_SAMPLERS
        states = {"torch_manual_seed": torch.get_rng_state()} if from_torch else capture_cpu_rng_state()
        self.start = {**states, "generators": generator_states(loader)}
        self.number = loader.iteration
        self.is_restored = self.at_end = False
        self.first_samples = None

    def rewind(self, loader: Any) -> Rewound:
        """Set random generators back to the start of the restored epoch; see `Rewound.restore`."""
        assert self.start is not None
        rewound = Rewound(capture_cpu_rng_state(), [])
        generators = self.start.get("generators", {})
        for name, owner in _owners(loader).items():
            if isinstance(owner, SeedableRandomSampler) or name not in generators:
                continue
            if generators[name] is not None:
                _set_generator(owner, generators[name])
            elif owner.generator is not None and name == "sampler":  # saved by one process, which needs none
                rewound.replaced_generators.append((owner, owner.generator))
                owner.generator = None
        restore_rng_state({key: self.start[key] for key in RNG_KEYS if key in self.start})
        self.is_restored = self.at_end = False
        return rewound

    def leave(self) -> None:
        """Note that the loop over it was left."""
        self.batches = None

    def finish(self) -> None:
        """Discard the states, because it was read to its end."""
        self.start = self.batches = None
        self.is_restored = self.at_end = False

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self, loader: Any) -> dict[str, Any]:
        """The state that is the same on all processes.

        Args:
            loader: The loader that reads it.

        Returns:
            Plain data: `iteration`, the number of the next epoch; `generators`, name to state of the loader's own;
            within an epoch `epoch_start` with the states that its order was drawn from, and `position`.
        """
        state: dict[str, Any] = {"iteration": loader.iteration, "generators": generator_states(loader)}
        if self.start is None:
            return state
        state["epoch_start"] = {**self.start, "epoch": self.number}
        if self.first_samples is not None:
            state["first_samples"] = self.first_samples  # which reading again need not give
        if self.at_end and loader.iteration == self.number:  # nothing is left of it: the next one begins
            state["iteration"] += 1
        elif self.batches:
            state["position"] = EpochPosition.of(loader, self.batches).state_dict()
        elif self.position is not None:  # loaded, and not iterated since
            state["position"] = self.position.state_dict()
        return state

    def reading_state(self, loader: Any) -> dict[str, Any]:
        """The random states from which this process and its workers read on; plain data, empty where they do not matter.

        Those of its order, too, where the loader reads a shard of its own.
        """
        states = dict(self.reading) if self.batches or self.is_restored else {}
        if reads_own_shard(loader):
            states[OWN_ORDER_KEY] = {"start": self.start, "generators": generator_states(loader)}
        workers = self.workers.state_dict(None if self.at_end else self.batches)
        return {**states, STATES_KEY: workers} if workers else states

    def restore_reading(self, loader: Any, states: dict[str, Any]) -> None:
        """Restore `reading_state`, after `restore`."""
        order = states.get(OWN_ORDER_KEY) if reads_own_shard(loader) else None
        if order is not None:
            self.start = order["start"] and dict(order["start"])
            _set_generators(loader, order["generators"])
        self.reading = {name: state for name, state in states.items() if name not in (STATES_KEY, OWN_ORDER_KEY)}
        self.workers = WorkerStates.from_state(states[STATES_KEY]) if STATES_KEY in states else WorkerStates()

    @classmethod
    def restore(cls, loader: Any, state: dict[str, Any]) -> None:
        """Give a loader the epoch that `state_dict` described; the one that it had is not changed.

        Args:
            loader: The loader to restore.
            state: What `state_dict` returned.
        """
        epoch = cls()
        epoch.start = dict(state["epoch_start"]) if state.get("epoch_start") is not None else None
        epoch.number = state["iteration"] if epoch.start is None else epoch.start.pop("epoch")
        epoch.is_restored = epoch.start is not None
        epoch.at_end = epoch.is_restored and state["iteration"] > epoch.number
        _set_generators(loader, state.get("generators", {}))
        epoch.first_samples = state.get("first_samples")
        if epoch.is_restored and "position" in state:
            epoch.position = EpochPosition.from_state(state["position"])
        loader.iteration = state["iteration"]
        loader.epoch = epoch


@contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """A context after which all random generators that a loader draws from have their earlier states."""
    states, generators = capture_cpu_rng_state(), generator_states(loader)
    try:
        yield
    finally:
        restore_rng_state(states)
        for name, owner in _owners(loader).items():
            state = generators[name]
            if state is not None:
                _set_generator(owner, state)


def generator_states(loader: Any) -> dict[str, torch.Tensor | None]:
    """The states of a loader's own generators; None for samplers that draw from torch's."""
    return {
        name: None if owner.generator is None else owner.generator.get_state()
        for name, owner in _owners(loader).items()
    }


def _owners(loader: Any) -> dict[str, Any]:
    """The samplers and datasets that draw the order of a loader's samples, and may have a generator of their own."""
    batches = innermost(batch_sampler_of(loader))
    candidates = {
        "sampler": index_sampler(loader),
        "batch_sampler": batches,
        "loader": loader.base_dataloader,
        "dataset": getattr(loader.dataset, "dataset", loader.dataset),  # inside the shard of a stream
    }
    return {
        name: owner
        for name, owner in candidates.items()
        if isinstance(getattr(owner, "generator", ""), (torch.Generator, type(None)))
    }


def _set_generators(loader: Any, saved: dict[str, Any]) -> None:
    for name, owner in _owners(loader).items():
        if saved.get(name) is not None and not isinstance(owner, SeedableRandomSampler):
            _set_generator(owner, saved[name])


def _set_generator(owner: Any, state: torch.Tensor) -> None:
    """Set a generator to a saved state; it is created where the run that saved it had one and this one does not."""
    if owner.generator is None:
        owner.generator = torch.Generator()
    owner.generator.set_state(state.cpu())
