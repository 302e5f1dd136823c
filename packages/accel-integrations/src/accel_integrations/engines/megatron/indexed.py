"""Megatron-LM's indexed datasets: tokens in pairs of files `.bin` and `.idx`, cut into samples by megatron-core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Subset

from accel_integrations.engines.megatron.library import load, quiet
from accel_ops.collectives.outcomes import exchange_outcomes

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
    problems = exchange_outcomes("" if error is None else str(error))
    if error is not None:
        raise error
    for rank, text in enumerate(problems):
        if text:
            raise ValueError(f"Rank {rank}: {text}")


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
