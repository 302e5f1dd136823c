"""The base of prepared data loaders: they wrap a torch loader, and register with the gradient state while iterated."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from accel_data.epoch import undisturbed
from accel_data.program_loaders import with_order_of
from accel_data.torchdata_state import check_position, next_epoch_state, saved_workers, with_last_worker_states
from accel_state.gradient_state import GradientState
from accel_state.libraries import is_torchdata_stateful_dataloader_available
from accel_state.public_names import known_as

LOADER_ARGUMENTS: dict[str, Any] = {
    "batch_size": 1,
    "shuffle": False,
    "sampler": None,
    "batch_sampler": None,
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
ORDER_KEY = "_epoch_order"
"""The key that prepared loaders add to torchdata's state, which torchdata ignores."""
READING_KEY = "reading"
"""Of the random states from which a process and its workers read on, beside those of the order."""
ORDER_ARGUMENTS = frozenset({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})


def copied_arguments(dataloader: Any) -> dict[str, Any]:
    """The arguments of a loader that do not affect which samples it reads."""
    return {
        name: getattr(dataloader, name, default)
        for name, default in LOADER_ARGUMENTS.items()
        if name not in ORDER_ARGUMENTS
    }


@known_as("accelerate.data_loader.DataLoaderAdapter")
class DataLoaderAdapter(DataLoader[Any]):
    """A loader that wraps another one and forwards attribute access to it.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        use_stateful_dataloader (`bool`): Have `state_dict` and `load_state_dict`; with torchdata, where it is installed.
        batch_sampler: As for `torch.utils.data.DataLoader`.
        kwargs: As above.

    Attributes:
        base_dataloader: The wrapped loader.
        reads_with_torchdata: Whether that is torchdata's `StatefulDataLoader`.
    """

    epoch: Any = None
    """The `Epoch` that is read, for loaders that have epochs."""
    reads_with_torchdata = False
    _loaded_position: dict[str, Any] | None = None
    _reads_base = True  # and not, for one epoch, another loader of its rest

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        # no call of super().__init__: all attributes of torch's class are found through __getattr__
        self.use_stateful_dataloader = use_stateful_dataloader
        self.reads_with_torchdata = use_stateful_dataloader and is_torchdata_stateful_dataloader_available()
        make: Any = _stateful_class() if self.reads_with_torchdata else DataLoader
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # a call of torchdata's
            self.base_dataloader: Any = make(dataset, batch_sampler=batch_sampler, **kwargs)

    def read_with(self, loader: DataLoader[Any]) -> None:
        """Read by a copy of a loader of a program's own class."""
        self.dataset = self.base_dataloader.dataset
        self.base_dataloader = with_order_of(loader, self.base_dataloader)
        self.reads_with_torchdata = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class for `isinstance`, besides the object's own: torchdata's, for a loader that wraps a stateful one."""
        return type(self.base_dataloader) if self.__dict__.get("reads_with_torchdata") else type(self)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # while a copy is being restored
            raise AttributeError(name)
        if name == "dl_state_dict" and self.reads_with_torchdata:
            self.dl_state_dict = self._state_before_reading()
            return self.dl_state_dict
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.base_dataloader)

    # ---- torchdata's state --------------------------------------------------------------------------------------

    @property
    def keeps_position(self) -> bool:
        """Whether this process has torchdata's position within the epoch that is read."""
        return self.reads_with_torchdata and self._reads_base

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch, and the random states of the epoch's order and of reading; only with a stateful loader."""
        self._require_position()
        position = self.dl_state_dict if self.reads_with_torchdata and self._reads_base else {}
        if self.epoch is None:
            return position
        return {**position, ORDER_KEY: self.epoch.state_dict(self) | {READING_KEY: self.epoch.reading_state(self)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the last batch, in the same order; only with a stateful loader.

        Raises:
            ValueError: It is no position of torchdata's, or was saved within an epoch with another number of workers.
        """
        self._require_position()
        if self.epoch is not None and ORDER_KEY in state_dict:
            self.epoch.restore(self, state_dict[ORDER_KEY])
            self.epoch.restore_reading(self, state_dict[ORDER_KEY].get(READING_KEY, {}))
        position = {key: value for key, value in state_dict.items() if key != ORDER_KEY}
        if self.reads_with_torchdata and (position or not state_dict):
            self._load_position(position)
        elif position and ORDER_KEY not in state_dict:
            raise ValueError(
                f"A dictionary with the keys {sorted(map(str, position))} is not the position of a data loader that reads without "
                "torchdata. Install torchdata if it is torchdata's, or load what this loader's state_dict() returned."
            )

    def _load_position(self, position: dict[str, Any]) -> None:
        """Load torchdata's position, unless it counts other batches than this loader reads; then the epoch's own holds."""
        if self.epoch is not None and self.epoch.position is not None and not self.epoch.position.fits(self):
            return
        check_position(position, self.base_dataloader)
        self.base_dataloader.load_state_dict(position)
        self._loaded_position = self.dl_state_dict = position

    def _require_position(self) -> None:
        if not self.use_stateful_dataloader:
            raise AttributeError(
                f"{type(self).__name__} has no state dict. Set DataLoaderConfiguration(use_stateful_dataloader=True), or use "
                "accelerator.save_state(), load_state() and skip_first_batches(), which need none."
            )

    def forget_position(self) -> None:
        """Start the next iteration with a full epoch, whatever position was loaded."""
        if self._loaded_position is not None:
            self._loaded_position = None
            self._forget_base_position()

    def _state_before_reading(self) -> dict[str, Any]:
        """The position before the first batch; torchdata starts an iteration for it, which must have no side effects."""
        with undisturbed(self):
            state = self.base_dataloader.state_dict()
            self.base_dataloader.load_state_dict(state)  # and ends that; reads anew when it is iterated
        return state

    def _consume_position(self) -> bool:
        """Whether the iteration that begins now does so mid-epoch, because a position was loaded."""
        loaded, self._loaded_position = self._loaded_position, None
        if not loaded:
            return False
        is_finished = bool(loaded.get("_iterator_finished"))
        if is_finished and self.keeps_position:
            self._read_end()
        return not is_finished

    def _read_end(self) -> None:
        """Load the state of an epoch's end into datasets and samplers that have a state; for the others, discard it.

        torchdata would start to read for that, with workers, and draw random numbers of the epoch that begins.
        """
        base = self.base_dataloader
        owners = (base.dataset, base.sampler, base.batch_sampler)
        fits = saved_workers(base.next_iter_state) == base.num_workers
        if fits and any(callable(getattr(owner, "state_dict", None)) for owner in owners):
            with undisturbed(self):
                state = base.state_dict()
            if base.num_workers and base.persistent_workers:
                base.load_state_dict(next_epoch_state(state, base.dataset))
        else:
            self._forget_base_position()

    def _forget_base_position(self) -> None:
        self.base_dataloader.load_state_dict({})
        self.base_dataloader.next_iter_state = None  # which torchdata keeps

    def adjust_state_dict_for_prefetch(self) -> None:
        """Correct `dl_state_dict` for batches that were read but not yielded.

        There are none, because the state is taken before the loader reads ahead. Subclasses may need to.
        """

    def _update_state_dict(self, finished: bool) -> None:
        if self.reads_with_torchdata:
            self.dl_state_dict = self.base_dataloader.state_dict()
            self.adjust_state_dict_for_prefetch()
            self.dl_state_dict["_iterator_finished"] = finished
            if finished:
                self.dl_state_dict = with_last_worker_states(self.dl_state_dict, self.base_dataloader)

    # ---- copies -------------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        attributes = {name: value for name, value in self.__dict__.items() if name != "gradient_state"}
        return _restore, (type(self), attributes)


@known_as("accelerate.data_loader.DataLoaderStateMixin")
class DataLoaderStateMixin:
    """Registers a loader with the gradient state while it is iterated, and marks its last batch.

    Attributes:
        end_of_dataloader (`bool`): Whether the current batch is the last one.
        remainder (`int`): How many samples of the last batch over all processes are real; 0 for all, -1 when unknown.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    gradient_state: GradientState
    if TYPE_CHECKING:  # of the loader that this is mixed into
        _drop_last: bool

        @property
        def total_dataset_length(self) -> int:
            """Samples over all processes."""

        @property
        def total_batch_size(self) -> int:
            """Samples of one batch over all processes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.end_of_dataloader = False
        cls.remainder = -1

    def reset(self) -> None:
        """Reset `end_of_dataloader` and `remainder`."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start an iteration."""
        self.reset()
        with contextlib.suppress(Exception):  # streams have no length
            if not self._drop_last:
                self.remainder = self.total_dataset_length % self.total_batch_size
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End an iteration."""
        self.gradient_state._remove_dataloader(self)


def _stateful_class() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def _restore(cls: type, attributes: dict[str, Any]) -> Any:
    loader: Any = object.__new__(cls)
    loader.__dict__.update(attributes)
    if isinstance(loader, DataLoaderStateMixin):
        loader.gradient_state = GradientState()
    return loader
