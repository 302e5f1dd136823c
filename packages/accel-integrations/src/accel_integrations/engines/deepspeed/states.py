"""Training states in DeepSpeed's form: a folder per engine, written and read by all ranks together."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from typing_extensions import override

from accel_integrations.training_state.formats.sharded import holds_deepspeed_states
from accel_integrations.training_state.formats.zero import ZeroFiles, engine_folder, has_known_files
from accel_integrations.training_state.interface import (
    CheckpointFiles,
    FileWriter,
    LoadRequest,
    PendingLoad,
    PendingSave,
    warn_of_unused,
)
from accel_ops.files.filenames import MODEL_NAME, numbered
from accel_ops.files.serialization import allowed_globals, load, save
from accel_state.environment import patch_environment

if TYPE_CHECKING:
    from accel_integrations.prepared.prepared import Prepared

BESIDE_STATES = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
SHARDED_STATES = re.compile(r".*zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
OPTIONS_OF_SAVING = frozenset({"client_state", "exclude_frozen_parameters", "save_latest"})
OPTIONS_OF_LOADING = frozenset({
    "custom_load_fn", "load_lr_scheduler_states", "load_module_only", "load_module_strict", "load_optimizer_states",
})  # fmt: skip


def write_engines(engines: Sequence[Any], folder: Path, options: dict[str, Any]) -> list[str]:
    """Write all engines; all ranks must call this.

    Args:
        engines: DeepSpeed's engines.
        folder: An existing folder, shared by all ranks.
        options: Arguments of `DeepSpeedEngine.save_checkpoint`.

    Returns:
        The written files that this rank is to register, relative to the folder: the files are divided evenly over
        ranks.
    """
    for index, engine in enumerate(engines):
        engine.save_checkpoint(os.fspath(folder), numbered(MODEL_NAME, index), **options)  # ends with a barrier
    written = [folder / name for name in BESIDE_STATES]
    for index in range(len(engines)):
        written += sorted((folder / numbered(MODEL_NAME, index)).rglob("*"))
    mine = [path for path in written if path.is_file()][dist.get_rank() :: dist.get_world_size()]
    return [path.relative_to(folder).as_posix() for path in mine]


@final
class EnginesSave(PendingSave):
    """States that DeepSpeed writes; all ranks together.

    Args:
        engines: DeepSpeed's engines.
        others: Prepared models that are in no engine.
        options: The extra keyword arguments of `save_state`, of which DeepSpeed takes `OPTIONS_OF_SAVING`.
    """

    def __init__(self, engines: Sequence[Any], others: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        self.weights = []
        self._engines = engines
        self._others = others
        self._options = {name: value for name, value in options.items() if name in OPTIONS_OF_SAVING}
        warn_of_unused({name: value for name, value in options.items() if name not in OPTIONS_OF_SAVING})

    @override
    def write(self, files: FileWriter, *, is_writer: bool, safe_serialization: bool) -> None:
        """Write the engines, and the other models on the main process."""
        files.adopt(write_plain(self._others, files.folder))
        files.adopt(write_engines(self._engines, files.folder, self._options))


@final
class EnginesLoad(PendingLoad):
    """The states of DeepSpeed's engines in a checkpoint, checked but not loaded yet.

    Args:
        request: The checkpoint, and how to load it: of `model_kwargs`, DeepSpeed takes `OPTIONS_OF_LOADING`.
        engines: DeepSpeed's engines, in the same order as when it was saved.
        others: Prepared models that are in no engine.
        prepared: The record of what was prepared.
    """

    def __init__(
        self,
        request: LoadRequest,
        engines: Sequence[Any],
        others: Sequence[nn.Module],
        prepared: Prepared,
    ) -> None:
        self._folder = request.checkpoint.folder
        self._all_engines = engines
        self._all_others = others
        self._prepared = prepared
        self._options = {
            "load_module_strict": request.strict,
            **{name: value for name, value in request.model_kwargs.items() if name in OPTIONS_OF_LOADING},
        }
        self._engines: list[tuple[Any, str]] = []
        self._others: list[tuple[nn.Module, dict[str, Any]]] = []

    @override
    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Check that states exist, for as many ranks, as plain data; read the models that are in no engine."""
        chosen = self._prepared.wrapped_of(models)
        engines = [(engine, index) for index, engine in enumerate(self._all_engines) if engine in chosen]
        self._engines = find_engines(self._folder, engines)
        self._others = [
            (model, read_plain(self._folder, index)) for index, model in enumerate(self._all_others) if model in chosen
        ]

    @override
    def apply(self) -> None:
        """Have all engines load their state.

        Raises:
            ValueError: A state cannot be loaded.
        """
        for model, weights in self._others:
            model.load_state_dict(weights)
        with plain_data_only():
            for engine, tag in self._engines:
                where, _ = engine.load_checkpoint(os.fspath(self._folder), tag, **self._options)
                if where is None:
                    raise ValueError(
                        f"DeepSpeed found nothing to load in {self._folder / tag}. Load another checkpoint."
                    )


def find_engines(folder: Path, engines: Sequence[tuple[Any, int]]) -> list[tuple[Any, str]]:
    """Check that a checkpoint can be loaded into engines, before any of them changes.

    Args:
        folder: The checkpoint.
        engines: DeepSpeed's engines, each with its position when it was saved.

    Returns:
        Each engine with the name of its folder.

    Raises:
        ValueError: A state is missing, was saved by another number of ranks, or holds more than plain data.
    """
    engine_tags = []
    for engine, index in engines:
        tag = numbered(MODEL_NAME, index)
        files = sorted((folder / tag).glob("*.pt"))
        if not files:
            raise ValueError(
                f"The checkpoint {folder} holds no state of model {index}: {tag!r} is missing. Prepare the same models "
                "as when it was saved, in the same order."
            )
        _check_num_shards(engine, folder / tag, [path.name for path in files])
        for path in files[dist.get_rank() :: dist.get_world_size()]:
            _check_plain(path)
        engine_tags.append((engine, tag))
    return engine_tags


def loads_as_saved(checkpoint: CheckpointFiles, engines: Sequence[Any]) -> bool:
    """Whether DeepSpeed itself can load its states from a checkpoint: of the same ZeRO stage, by as many ranks.

    Raises:
        ValueError: The states of an engine are damaged.
    """
    if not holds_deepspeed_states(checkpoint.names):
        return False
    for index, engine in enumerate(engines):
        folder = engine_folder(checkpoint.folder, index)
        if engine.load_universal_checkpoint() or not folder.is_dir() or not has_known_files(folder):
            continue
        saved = ZeroFiles.read(folder)
        group = getattr(engine.optimizer, "dp_process_group", None)
        num_ranks = dist.get_world_size(group) if group is not None else len(saved.shards)
        if saved.stage != engine.zero_optimization_stage() or len(saved.shards) != num_ranks:
            return False
    return True


def _check_num_shards(engine: Any, folder: Path, names: Sequence[str]) -> None:
    """Check that a state sharded by ZeRO was saved by as many ranks as load it."""
    shards = {match[1] for name in names if (match := SHARDED_STATES.fullmatch(name))}
    group = getattr(engine.optimizer, "dp_process_group", None)
    here = dist.get_world_size(group) if group is not None else None
    if shards and here is not None and len(shards) != here and not engine.load_universal_checkpoint():
        raise ValueError(
            f"{folder} holds the state of {len(shards)} processes, but this run has {here}. Launch {len(shards)} "
            "processes, or convert it with `python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state` and "
            "set checkpoint.load_universal in the DeepSpeed configuration."
        )


def known_classes() -> list[Any]:
    """Classes that DeepSpeed's states contain beside plain data; they hold values only and run no code."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [*allowed_globals(), LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _check_plain(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        return  # torch's older format: checked while loading
    with safe_globals(known_classes()):
        try:
            unknown = get_unsafe_globals_in_checkpoint(path)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(
                f"{path} cannot be loaded ({error}): it is damaged, or was not written by torch.save. Load another "
                "checkpoint."
            ) from error
    if unknown:
        raise ValueError(
            f"{path} holds more than plain data: it names {', '.join(sorted(unknown))}. Nothing of it was executed. If "
            "you trust its author, allow these with torch.serialization.add_safe_globals([...]) and load again."
        )


@contextmanager
def plain_data_only() -> Iterator[None]:
    """A context in which DeepSpeed, too, loads files as plain data only: no code in them runs.

    Raises:
        ValueError: A file holds more.
    """
    try:
        with patch_environment(torch_force_weights_only_load=1), safe_globals(known_classes()):  # torch.load reads it
            yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The checkpoint holds more than plain data, and nothing of it was executed: {error}"
        ) from error


# ---- models that are prepared without being trained -----------------------------------------------------------------


def write_plain(models: Sequence[Any], folder: Path) -> list[str]:
    """Write models that are in no engine, on the main process; returns the file names."""
    for index, model in enumerate(models):
        save(model.state_dict(), folder / _plain_file(index))
    return [_plain_file(index) for index in range(len(models))] if dist.get_rank() == 0 else []


def read_plain(folder: Path, index: int) -> dict[str, Any]:
    """Read such a model's weights."""
    weights: dict[str, Any] = load(folder / _plain_file(index), map_location="cpu")
    return weights


def _plain_file(index: int) -> str:
    return f"plain_model_{index}.bin"
