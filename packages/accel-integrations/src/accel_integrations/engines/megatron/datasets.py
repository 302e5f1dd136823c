"""Data loaders in the places of `MegatronLMDummyDataLoader`s, over indexed datasets or those that a function makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from accel_integrations.engines.megatron.indexed import indexed_datasets
from accel_integrations.engines.megatron.tasks import Causal, Task
from accel_integrations.megatron_dummies import MegatronLMDummyDataLoader, MegatronLMDummyScheduler

if TYPE_CHECKING:
    from accel_state.settings.megatron import MegatronLMPlugin


def fill_dummies(objects: Sequence[Any], plugin: MegatronLMPlugin, replicas: int) -> list[Any]:
    """The arguments of `prepare` with loaders of training, validation and test data for the dummies, in this order.

    Args:
        objects: The arguments; every dummy may be the same object.
        plugin: Has the function that makes the datasets, and the length of the run.
        replicas: How many ranks read different data.

    Raises:
        ValueError: The number of samples is not known, the function returned too few datasets, or an argument is wrong.
        FileNotFoundError: Files of an indexed dataset are missing.
    """
    places = dummy_places(objects)
    if not places:
        return list(objects)
    options = objects[places[0]].dataset_args
    size = options.get("micro_batch_size")
    if not isinstance(size, int):
        raise ValueError(
            f"MegatronLMDummyDataLoader has micro_batch_size={size!r}. Pass the number of samples of a micro-batch to it."
        )
    scheduler = next((one for one in objects if isinstance(one, MegatronLMDummyScheduler)), None)
    counts = _sample_counts(plugin, scheduler, size * plugin.num_micro_batches * replicas, replicas)
    provide = plugin.custom_megatron_datasets_provider_function
    datasets = indexed_datasets(options, plugin.seq_length, counts) if provide is None else list(provide(counts))
    if len(datasets) < len(places):
        raise ValueError(
            f"custom_megatron_datasets_provider_function returned {len(datasets)} datasets for {len(places)} "
            "MegatronLMDummyDataLoaders. Return those for training, validation and test."
        )
    arguments = list(objects)
    for place, dataset in zip(places, datasets, strict=False):
        if dataset is None:
            raise ValueError(
                "The split of MegatronLMDummyDataLoader leaves no samples for one of its datasets. Change it."
            )
        whole = not isinstance(dataset, IterableDataset)
        arguments[place] = DataLoader(dataset, batch_size=size, drop_last=whole)
    return arguments


def check_model(task: Task, places: Sequence[int], plugin: MegatronLMPlugin) -> None:
    """Check that a model can be trained on the datasets in these places.

    Raises:
        NotImplementedError: They are indexed datasets, and the model does not predict the next token.
    """
    if places and plugin.custom_megatron_datasets_provider_function is None and not isinstance(task, Causal):
        raise NotImplementedError(
            "Megatron-LM's indexed datasets are read for models that predict the next token only. Pass an ordinary DataLoader to "
            "prepare(), or set MegatronLMPlugin(custom_megatron_datasets_provider_function=...)."
        )


def dummy_places(objects: Sequence[Any]) -> list[int]:
    """Where dummies are among the arguments of `prepare`."""
    return [index for index, one in enumerate(objects) if isinstance(one, MegatronLMDummyDataLoader)]


class SteppedLoader:
    """A prepared loader, and an iterator, too, as programs for Megatron-LM's loaders expect: they call `next(loader)`.

    Args:
        loader: The prepared loader, which has all other attributes.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._steps: Iterator[Any] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The loader's, for `isinstance`."""
        return type(self.__dict__["_loader"])

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __next__(self) -> Any:
        self._steps = iter(self._loader) if self._steps is None else self._steps
        try:
            return next(self._steps)
        except StopIteration:
            self._steps = None
            raise


def _sample_counts(plugin: MegatronLMPlugin, scheduler: Any, samples_per_step: int, replicas: int) -> list[int]:
    """How many samples a run reads for training, validation and test."""
    steps = plugin.train_iters
    if steps is None and scheduler is not None and scheduler.total_num_steps is not None:
        steps = scheduler.total_num_steps // replicas
    if steps is None:
        raise ValueError(
            "The number of samples of the datasets is not known. Set train_iters of MegatronLMPlugin, or pass a "
            "MegatronLMDummyScheduler with total_num_steps to the same call of prepare()."
        )
    evaluations = steps // plugin.eval_interval + 1
    return [
        steps * samples_per_step,
        evaluations * plugin.eval_iters * samples_per_step,
        plugin.eval_iters * samples_per_step,
    ]
