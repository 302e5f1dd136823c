"""Training states in DeepSpeed's form: a folder per engine, written and read by all processes together."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from accel_integrations.checkpoints.forms import holds_engines
from accel_ops.filenames import MODEL_NAME
from accel_ops.files import allowed_globals, load, save

BESIDE_STATES = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
DIVIDED_STATES = re.compile(r".*zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
OPTIONS_OF_SAVING = frozenset({"client_state", "exclude_frozen_parameters", "save_latest"})
OPTIONS_OF_LOADING = frozenset({
    "custom_load_fn", "load_lr_scheduler_states", "load_module_only", "load_module_strict", "load_optimizer_states",
})  # fmt: skip
FORCES_PLAIN_DATA = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # read by torch.load at every call


def tag_of(index: int) -> str:
    """The folder of the engine at `index`, as accelerate 1.15 names it."""
    return MODEL_NAME if index == 0 else f"{MODEL_NAME}_{index}"


def write_engines(engines: Sequence[Any], folder: Path, options: dict[str, Any]) -> list[str]:
    """Write all engines; every process must call this.

    Args:
        engines: DeepSpeed's engines.
        folder: Exists already, and is seen by all processes.
        options: Arguments of `DeepSpeedEngine.save_checkpoint`.

    Returns:
        A fair share of the files that are there now, relative to the folder.
    """
    for index, engine in enumerate(engines):
        engine.save_checkpoint(os.fspath(folder), tag_of(index), **options)  # ends with a barrier
    written = [folder / name for name in BESIDE_STATES]
    for index in range(len(engines)):
        written += sorted((folder / tag_of(index)).rglob("*"))
    mine = [path for path in written if path.is_file()][dist.get_rank() :: dist.get_world_size()]
    return [path.relative_to(folder).as_posix() for path in mine]


@dataclass
class StoredEngines:
    """What a checkpoint holds for this run's engines, looked at but not loaded yet.

    Attributes:
        folder: The checkpoint.
        engines: Each with the name of its folder.
        options: Arguments of `DeepSpeedEngine.load_checkpoint`.
        plain: Models that are in no engine, each with its weights.
    """

    folder: Path
    engines: list[tuple[Any, str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    plain: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)

    def apply(self) -> None:
        """Have all engines load their state; every process must call this.

        Raises:
            ValueError: Some of it cannot be loaded.
        """
        for model, weights in self.plain:
            model.load_state_dict(weights)
        with plain_data_only():
            for engine, tag in self.engines:
                where, _ = engine.load_checkpoint(os.fspath(self.folder), tag, **self.options)
                if where is None:
                    raise ValueError(
                        f"DeepSpeed found nothing to load in {self.folder / tag}: load another checkpoint."
                    )


def open_engines(folder: Path, engines: Sequence[tuple[Any, int]], options: dict[str, Any]) -> StoredEngines:
    """See that a checkpoint can be loaded into engines, before any of them changes.

    Args:
        folder: The checkpoint.
        engines: DeepSpeed's engines, each with its position when it was saved.
        options: Arguments of `DeepSpeedEngine.load_checkpoint`.

    Raises:
        ValueError: A state is missing, was saved by another number of processes, or holds more than plain data.
    """
    stored = StoredEngines(folder, options=options)
    for engine, index in engines:
        tag = tag_of(index)
        files = sorted((folder / tag).glob("*.pt"))
        if not files:
            raise ValueError(
                f"The checkpoint {folder} holds no state of model {index}: {tag!r} is missing. Prepare the same models "
                "as when it was saved, in the same order."
            )
        _check_shares(engine, folder / tag, [path.name for path in files])
        for path in files[dist.get_rank() :: dist.get_world_size()]:
            _check_plain(path)
        stored.engines.append((engine, tag))
    return stored


def check_form(names: Collection[str], folder: Path) -> None:
    """Refuse a checkpoint without DeepSpeed's states.

    Raises:
        ValueError: Saying what to do with it.
    """
    if not holds_engines(names):
        raise ValueError(
            f"The checkpoint {folder} was not saved under DeepSpeed: load it without DeepSpeed, or load its weights "
            "into the model before it is prepared."
        )


def _check_shares(engine: Any, folder: Path, names: Sequence[str]) -> None:
    """DeepSpeed loads the states that ZeRO has divided into as many processes again only."""
    shares = {found[1] for name in names if (found := DIVIDED_STATES.fullmatch(name))}
    group = getattr(engine.optimizer, "dp_process_group", None)
    here = dist.get_world_size(group) if group is not None else None
    if shares and here is not None and len(shares) != here and not engine.load_universal_checkpoint():
        raise ValueError(
            f"{folder} holds the state of {len(shares)} processes, but there are {here}: launch {len(shares)}, or "
            "convert it with `python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state` and set "
            "checkpoint.load_universal in the DeepSpeed configuration."
        )


def known_classes() -> list[Any]:
    """What DeepSpeed writes beside plain data: classes that hold numbers and addresses, and run no code."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [*allowed_globals(), LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _check_plain(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        return  # torch's older format: refused while loading
    with safe_globals(known_classes()):
        try:
            unknown = get_unsafe_globals_in_checkpoint(path)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"{path} cannot be loaded ({error}): it is damaged or not from torch.save.") from error
    if unknown:
        raise ValueError(
            f"{path} holds more than plain data, and nothing of it was run (it names {', '.join(sorted(unknown))}). If "
            "you trust who wrote it, allow these with torch.serialization.add_safe_globals([...]) and load again."
        )


@contextmanager
def plain_data_only() -> Iterator[None]:
    """A block in which DeepSpeed, too, loads files as data only: no code in them runs.

    Raises:
        ValueError: A file holds more.
    """
    before = os.environ.get(FORCES_PLAIN_DATA)
    os.environ[FORCES_PLAIN_DATA] = "1"
    try:
        with safe_globals(known_classes()):
            yield
    except pickle.UnpicklingError as error:
        raise ValueError(f"The checkpoint holds more than plain data, and nothing of it was run: {error}") from error
    finally:
        if before is None:
            del os.environ[FORCES_PLAIN_DATA]
        else:
            os.environ[FORCES_PLAIN_DATA] = before


# ---- models that are prepared without being trained -----------------------------------------------------------------


def write_plain(models: Sequence[Any], folder: Path) -> list[str]:
    """Write models that no engine holds, on the main process; returns the files."""
    for index, model in enumerate(models):
        save(model.state_dict(), folder / _plain_file(index))
    return [_plain_file(index) for index in range(len(models))] if dist.get_rank() == 0 else []


def read_plain(folder: Path, index: int) -> dict[str, Any]:
    """Read such a model's weights."""
    weights: dict[str, Any] = load(folder / _plain_file(index), map_location="cpu")
    return weights


def _plain_file(index: int) -> str:
    return f"plain_model_{index}.bin"
