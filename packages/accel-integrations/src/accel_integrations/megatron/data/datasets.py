"""Data loaders in the places of `MegatronLMDummyDataLoader`s, over indexed datasets or those that a function makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Subset

from accel_integrations.megatron.core import load, quiet
from accel_integrations.megatron.data.tasks import Causal, Task
from accel_integrations.megatron.groups import raise_on_all_ranks
from accel_integrations.megatron.placeholders import MegatronLMDummyDataLoader, MegatronLMDummyScheduler

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


SPLITS = ("train_data_path", "valid_data_path", "test_data_path")
OPTIONS = ("data_path", *SPLITS, "split", "splits_string", "seq_length", "seed", "data_cache_path", "data_impl")
"""What is known of a `MegatronLMDummyDataLoader`; Megatron-LM's names, and those of its older versions."""
OF_THE_LOADER = ("micro_batch_size", "megatron_dataset_flag")
DEFAULT_SPLIT, DEFAULT_SEED = "969, 30, 1", 1234


class NoTokenizer:
    """Stands for a tokenizer, of which a dataset of tokens needs to know nothing but that none of them is padding."""

    vocab_size = None
    eod = pad = eos = -1
    unique_identifiers: Mapping[str, str] = {"class": "none"}


def indexed_datasets(options: Mapping[str, Any], seq_length: int | None, counts: Sequence[int]) -> list[Any]:
    """The datasets for training, validation and test; all ranks call this.

    Their samples are tokens, the next tokens (`labels`), which of these count (`loss_mask`) and positions, each (S,).

    Args:
        options: What the program gave a `MegatronLMDummyDataLoader`.
        seq_length: S, unless an option says it.
        counts: How many samples are read of each.

    Raises:
        ValueError: For an option that is not known, or missing, a split that leaves a part empty, or a file in the cache
            that is no array.
        FileNotFoundError: There are no such files.
    """
    if unknown := sorted(set(options) - {*OPTIONS, *OF_THE_LOADER}):
        raise ValueError(
            f"MegatronLMDummyDataLoader has {', '.join(map(repr, unknown))}, which indexed datasets do not take. Pass "
            f"{', '.join((*OPTIONS, OF_THE_LOADER[0]))} only."
        )
    length = options.get("seq_length", seq_length)
    if not isinstance(length, int):
        raise ValueError(
            f"MegatronLMDummyDataLoader has seq_length={length!r}. Pass the number of tokens of a sample to it."
        )
    parts = [_blend(options.get(name)) for name in SPLITS]
    whole = _blend(options.get("data_path"))
    if (whole is None) == (not any(parts)):
        raise ValueError(
            "MegatronLMDummyDataLoader needs data_path, the path of the files without .bin and .idx, or "
            f"{', '.join(SPLITS)}, but not both."
        )
    prefixes = [Path(prefix) for blend in (whole, *parts) if blend is not None for prefix in blend[0]]
    cache = Path(options.get("data_cache_path") or prefixes[0].parent / "cache")
    _check_files_on_all_ranks(prefixes, cache)
    gpt, builder = load("datasets.gpt_dataset"), load("datasets.blended_megatron_dataset_builder")
    with quiet():
        config = gpt.GPTDatasetConfig(
            random_seed=options.get("seed", DEFAULT_SEED),
            sequence_length=length,
            blend=whole,
            blend_per_split=None if whole is not None else parts,
            split=options.get("split") or options.get("splits_string") or DEFAULT_SPLIT if whole is not None else None,
            path_to_cache=str(cache),
            tokenizer=NoTokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        _check_split(prefixes, config)
        datasets = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, list(counts), lambda: True, config).build()
    # whole epochs of the files were made, which are at least as many
    return [None if one is None else Subset(one, range(count)) for one, count in zip(datasets, counts, strict=True)]


def _check_split(prefixes: Sequence[Path], config: Any) -> None:
    """Check that each part has a document: megatron-core would look for the samples of an empty one without end."""
    for prefix in prefixes if config.split_matrix is not None else ():
        count = len(load("datasets.indexed_dataset").IndexedDataset(str(prefix)).sequence_lengths)
        for part in config.split_matrix:
            if part is not None and round(part[0] * count) == round(part[1] * count):
                raise ValueError(
                    f"split={config.split!r} leaves one part of the {count} documents of {prefix} without any. Give each part "
                    "that is not 0 at least one of them."
                )


def _blend(paths: Any) -> tuple[list[str], list[float] | None] | None:
    """Paths, and their weights if there are any, from what Megatron-LM takes: one, several, or weights before paths."""
    if not paths:
        return None
    listed = paths.split() if isinstance(paths, str) else [str(one) for one in paths]
    blend: tuple[list[str], list[float] | None] = load("datasets.utils").get_blend_from_list(listed)
    return blend


def _check_files_on_all_ranks(prefixes: Sequence[Path], cache: Path) -> None:
    """Check the files before any rank goes on: rank 0 then writes into the cache, where others would find half a file."""
    error: Exception | None = None
    try:
        _check_files(prefixes, cache)
    except (OSError, ValueError) as problem:
        error = problem
    raise_on_all_ranks(error)


def _check_files(prefixes: Sequence[Path], cache: Path) -> None:
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            if not Path(f"{prefix}{suffix}").is_file():
                raise FileNotFoundError(
                    f"There is no {prefix}{suffix}. Pass data_path without .bin and .idx, as Megatron-LM's preprocess_data.py "
                    "wrote them."
                )
    for index in sorted(cache.glob("*.npy")):
        try:
            np.load(index, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:  # megatron-core would unpickle it
            raise ValueError(f"{index} is no array of numbers ({error}). Delete it; it will be made again.") from error
