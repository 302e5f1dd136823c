"""Progress bars that are shown once in a distributed run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from accel_state.errors import missing_library
from accel_state.libraries import is_tqdm_available
from accel_state.processes import PartialState

Item = TypeVar("Item")


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by the first process of each machine.

    Args:
        args: For `tqdm`, the iterable first.
        main_process_only (`bool`): False shows a bar on every process.
        kwargs: For `tqdm`.

    Returns:
        The bar, to iterate over or to update.

    Raises:
        ValueError: When the first argument is a bool, as an old spelling of `main_process_only` was.
        ImportError: When tqdm is not installed.

    Example:
        ```python
        for batch in tqdm(loader, desc="epoch 1"):
            ...
        ```
    """
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"tqdm({args[0]!r}, ...) got a bool as its first argument. Pass the iterable first, and main_process_only by keyword."
        )
    bar = _bar_class()
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = PartialState().local_process_index != 0
    return bar(*args, **kwargs)


def progress_bar(
    batches: Iterable[Item],
    desc: str | None = None,
    *,
    samples_per_batch: int | None = None,
    num_samples: int | None = None,
    **kwargs: Any,
) -> ProgressBar[Item]:
    """A bar that counts the samples of all processes together, shown by the run's main process only.

    Its rate is that of all processes, in samples per second. Inside another bar it is removed when it is done; in a
    notebook it is a widget.

    Args:
        batches (iterable): What to iterate over, usually a prepared data loader, which has `total_batch_size` and a length.
        desc (`str`, *optional*): A description, shown before the bar.
        samples_per_batch (`int`, *optional*): Samples in a batch of all processes together; by default read from
            `batches`, or else the size of each batch times the number of processes.
        num_samples (`int`, *optional*): The total number of samples; by default read from `batches`.
        kwargs: For `tqdm`, such as `leave` or `file`.

    Returns:
        The bar, to iterate over.

    Raises:
        ImportError: When tqdm is not installed.
        ValueError: When `samples_per_batch` is less than 1.

    Example:
        ```python
        for batch in (bar := progress_bar(loader, desc="epoch 1")):
            loss = step(batch)
            bar.show(loss=loss)
        ```
    """
    if samples_per_batch is not None and samples_per_batch < 1:
        raise ValueError(
            f"samples_per_batch={samples_per_batch!r} is not a number of samples. Pass an int of 1 or more."
        )
    return ProgressBar(batches, desc, samples_per_batch, num_samples, kwargs)


class ProgressBar(Generic[Item]):
    """What `progress_bar` returns.

    Attributes:
        bar: The bar of tqdm; its methods do nothing on processes that show none.
    """

    def __init__(
        self,
        batches: Iterable[Item],
        desc: str | None,
        samples_per_batch: int | None,
        num_samples: int | None,
        settings: dict[str, Any],
    ) -> None:
        bar = _bar_class()
        self.batches = batches
        self.samples_per_batch = samples_per_batch or _total_batch_size(batches)
        self.num_samples = (
            num_samples if num_samples is not None else _length_in_samples(batches, self.samples_per_batch)
        )
        passed = getattr(batches, "skip_batches", 0) * (self.samples_per_batch or 0)
        defaults = {
            "total": self.num_samples,
            "initial": passed,
            "unit": " samples",
            "unit_scale": True,
            "leave": None,  # only the outermost bar stays
            "dynamic_ncols": True,
            "disable": not PartialState().is_main_process,
        }
        self.bar = bar(desc=desc, **{**defaults, **settings})
        self._is_shown = not self.bar.disable  # a bar that is done counts as disabled
        self._to_show: dict[str, Any] = {}
        self._shown_at = 0.0

    def __len__(self) -> int:
        """The number of batches."""
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Item]:
        """The batches; each is counted when the next one is requested."""
        if self.bar.disable:
            yield from self.batches
            return
        with self.bar:
            for batch in self.batches:
                yield batch
                self.bar.update(self._num_samples_of(batch))
            self._show_now()

    def _num_samples_of(self, batch: Item) -> int:
        count = self.samples_per_batch
        if count is None:
            count = (_batch_size(batch) or 1) * PartialState().num_processes
        if self.num_samples is not None:  # the last batch has fewer
            count = max(0, min(count, self.num_samples - self.bar.n))
        return count

    def show(self, **values: Any) -> None:
        """Show values at the end of the bar.

        Args:
            values: By name; tensors with one element are shown as numbers, and read from their device only when the bar is drawn.
        """
        if self.bar.disable:
            return
        self._to_show |= values
        if time.monotonic() - self._shown_at >= self.bar.mininterval:
            self._show_now()

    def _show_now(self) -> None:
        from accel_tracking.values import number

        values, self._to_show, self._shown_at = self._to_show, {}, time.monotonic()
        if values:
            plain = {name: value if (scalar := number(value)) is None else scalar for name, value in values.items()}
            self.bar.set_postfix(plain, refresh=False)

    def write(self, text: str) -> None:
        """Print a line above the bars, on the main process."""
        if self._is_shown:
            self.bar.write(text)


def _bar_class() -> Any:
    if not is_tqdm_available():
        raise missing_library("tqdm", extra="progress", why="The progress bar")
    from tqdm.auto import tqdm as bar

    return bar


def _total_batch_size(batches: Any) -> int | None:
    """Samples in a batch of all processes, when the loader knows."""
    try:
        total = batches.total_batch_size if hasattr(batches, "total_batch_size") else batches.batch_size
    except (AttributeError, TypeError):  # not a loader, or one of a stream
        return None
    return total if isinstance(total, int) else None


def _length_in_samples(batches: Any, samples_per_batch: int | None) -> int | None:
    try:
        if hasattr(batches, "total_dataset_length"):
            return int(batches.total_dataset_length)
        return len(batches.dataset) if hasattr(batches, "dataset") else len(batches) * (samples_per_batch or 1)
    except TypeError:  # a stream
        return None


def _batch_size(batch: Any) -> int | None:
    from accel_ops.batches import ignorant_find_batch_size

    return ignorant_find_batch_size(batch)
