"""Sharded states: each rank writes its own shards, and reads its own shards back from any form."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import nn
from typing_extensions import override

from accel_integrations.training_state.formats.forms import write_states
from accel_integrations.training_state.interface import FileWriter, LoadRequest, PendingLoad, PendingSave
from accel_integrations.training_state.loading import BuiltNames, LoadedStates, read_states
from accel_ops.files.filenames import FSDP_MODEL_NAME, MODEL_NAME

if TYPE_CHECKING:
    from accel_integrations.prepared.prepared import Prepared


DEEPSPEED_STATES = re.compile(rf"{MODEL_NAME}(?:_\d+)?/.*_states\.pt")


@final
class ShardedStatesSave(PendingSave):
    """Sharded states of all prepared models and optimizers, written by all ranks.

    Args:
        prepared: The models and optimizers.
        form: A key of `formats.forms.FORMS`, such as "SHARDED_STATE_DICT".
    """

    def __init__(self, prepared: Prepared, form: Any) -> None:
        self.weights = []
        self._prepared = prepared
        self._form = str(getattr(form, "name", form))

    @override
    def write(self, files: FileWriter, *, is_writer: bool, safe_serialization: bool) -> None:
        prepared = self._prepared
        write_states(prepared.wrapped, prepared.optimizers, files, self._form)


@final
class ShardedStatesLoad(PendingLoad):
    """States of which each rank reads its shards, saved by any number of ranks in any form.

    Args:
        request: The checkpoint, and how to load it.
        prepared: The models and optimizers of this run.
        built_names: As `Engine.built_names`.
    """

    def __init__(
        self,
        request: LoadRequest,
        prepared: Prepared,
        built_names: Callable[[Any], BuiltNames | None],
    ) -> None:
        self._folder = request.checkpoint.folder
        self._strict = request.strict
        self._prepared = prepared
        self._built_names = built_names
        self._states = LoadedStates()

    @override
    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Read this rank's shards of models and of all optimizers, and compare them."""
        prepared = self._prepared
        chosen = prepared.wrapped_of(models)
        self._states = read_states(
            self._folder,
            chosen,
            prepared.optimizers,
            owners=prepared.wrapped,
            strict=self._strict,
            built_names=self._built_names,
        )

    @override
    def apply(self) -> None:
        """Load models and optimizers."""
        self._states.apply()


def check_shared_folder(sees_main: bool, folder: Path) -> None:
    """Check that all ranks write into the same folder: shards in separate folders could not be loaded.

    Args:
        sees_main: Whether this rank sees the files of rank 0.
        folder: The folder of the checkpoint.

    Raises:
        ValueError: It does not.
    """
    if not sees_main:
        raise ValueError(
            f"save_state: this machine does not see the files that rank 0 writes next to {folder}, but all ranks write "
            "a sharded checkpoint into one folder. Save to a file system that all machines share."
        )


# ---- which engine saved a checkpoint, by the names of its files -----------------------------------------------------


def holds_deepspeed_states(names: Collection[str]) -> bool:
    """Whether the files of a checkpoint (paths relative to it) include states of DeepSpeed."""
    return any(DEEPSPEED_STATES.fullmatch(name) for name in names)


def holds_shards(names: Collection[str]) -> bool:
    """Whether the files of a checkpoint include models saved by FSDP, in any form."""
    return any(name.startswith(FSDP_MODEL_NAME) for name in names)


def is_by_name(names: Collection[str]) -> bool:
    """Whether a checkpoint holds states by names of parameters, of which a rank reads what it needs."""
    return holds_shards(names) or holds_deepspeed_states(names)
