"""Data loaders over the datasets that a function of the program makes, in the places of `MegatronLMDummyDataLoader`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from accel_integrations.megatron_dummies import NO_DATASETS, MegatronLMDummyDataLoader, MegatronLMDummyScheduler

if TYPE_CHECKING:
    from accel_state.settings.megatron import MegatronLMPlugin


def fill_dummies(objects: Sequence[Any], plugin: MegatronLMPlugin, replicas: int) -> list[Any]:
    """The arguments of `prepare` with loaders of training, validation and test data for the dummies, in this order.

    Args:
        objects: The arguments; every dummy may be the same object.
        plugin: Has the function that makes the datasets, and the length of the run.
        replicas: How many ranks read different data.

    Raises:
        NotImplementedError: There is no such function.
        ValueError: The number of samples is not known, or the function returned too few datasets.
    """
    places = [index for index, one in enumerate(objects) if isinstance(one, MegatronLMDummyDataLoader)]
    if not places:
        return list(objects)
    provide = plugin.custom_megatron_datasets_provider_function
    if provide is None:
        raise NotImplementedError(NO_DATASETS)
    size = objects[places[0]].dataset_args.get("micro_batch_size")
    if not isinstance(size, int):
        raise ValueError(
            f"MegatronLMDummyDataLoader has micro_batch_size={size!r}. Pass the number of samples of a micro-batch to it."
        )
    scheduler = next((one for one in objects if isinstance(one, MegatronLMDummyScheduler)), None)
    datasets = list(provide(_sample_counts(plugin, scheduler, size * plugin.num_micro_batches * replicas, replicas)))
    if len(datasets) < len(places):
        raise ValueError(
            f"custom_megatron_datasets_provider_function returned {len(datasets)} datasets for {len(places)} "
            "MegatronLMDummyDataLoaders. Return those for training, validation and test."
        )
    found = list(objects)
    for place, dataset in zip(places, datasets, strict=False):
        whole = not isinstance(dataset, IterableDataset)
        found[place] = DataLoader(dataset, batch_size=size, drop_last=whole)
    return found


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
