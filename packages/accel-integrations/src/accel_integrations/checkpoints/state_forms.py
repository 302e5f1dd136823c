"""How the states of models and optimizers whose parts lie in several processes are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.prepared.parameters import plain_name
from accel_ops.durable import make_folder, write_atomically
from accel_ops.filenames import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_ops.files import check_loadable, serialize
from accel_ops.modules import full_tensor, is_compiled_module, to_local


@dataclass(frozen=True, slots=True)
class StateKind:
    """What is written.

    Attributes:
        key: The key above it in a sharded checkpoint.
        stem: How the names of its files begin.
    """

    key: str
    stem: str

    def folder_name(self, index: int) -> str:
        """The folder of the object at `index`, in the sharded form."""
        return f"{self.stem}_{index}"

    def file_name(self, index: int) -> str:
        """The file of the object at `index`, in the full form."""
        return f"{self.stem}_{index}.bin" if index else f"{self.stem}.bin"

    def rank_file_name(self, index: int, rank: int) -> str:
        """The file of one process for the object at `index`, in the local form."""
        return f"{self.stem}_{index}_rank{rank}.bin" if index else f"{self.stem}_rank{rank}.bin"


MODEL = StateKind("model", FSDP_MODEL_NAME)
OPTIMIZER = StateKind("optimizer", OPTIMIZER_NAME)


# ---- what there is to write -----------------------------------------------------------------------------------------


def model_state(model: nn.Module) -> dict[str, Any]:
    """What this process holds of a model, under the names that the user's model gives.

    Args:
        model: As prepared. Parameters that are divided come as distributed tensors.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(without_compilation(model))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this process holds of an optimizer's state.

    Args:
        model: As prepared, with all parameters that the optimizer has.
        optimizer: The plain one.

    Returns:
        `{"state": {parameter name: {...}}, "param_groups": [{"params": [parameter name, ...], ...}]}`.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(without_compilation(model), optimizer)


def without_compilation(model: Any) -> nn.Module:
    """The model that `torch.compile` was given."""
    found: nn.Module = model._orig_mod if is_compiled_module(model) else model
    return found


def full_model_state(model: nn.Module) -> dict[str, Any]:
    """A model's whole tensors in CPU memory on the main process, nothing on the others; all processes call this.

    One tensor at a time is gathered, and no other process keeps it.
    """
    state: dict[str, Any] = gather_on_first(model_state(model))
    return state


def gather_on_first(value: Any) -> Any:
    """A nested state with whole tensors in CPU memory on the main process; empty dictionaries on the others."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if isinstance(value, Mapping):
        gathered = {key: gather_on_first(inner) for key, inner in value.items()}
        return gathered if is_first else {}
    if isinstance(value, (list, tuple)):
        return type(value)(gather_on_first(inner) for inner in value)
    if not isinstance(value, torch.Tensor):
        return value
    full = full_tensor(value)
    return full.detach().cpu() if is_first else None


def model_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> nn.Module:
    """The model whose parameters an optimizer has.

    Raises:
        ValueError: When its parameters are those of no model, or of several.
    """
    wanted = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if wanted <= set(model.parameters()):
            return model
    raise ValueError(
        f"{type(optimizer).__name__} has parameters that are not all in one prepared model, so its state cannot be "
        "stored by their names: prepare its model, and give every model an optimizer of its own."
    )


# ---- forms ----------------------------------------------------------------------------------------------------------

Collect = Callable[[], Any]


def _write_sharded(kind: StateKind, index: int, folder: Path, collect: Collect) -> list[str]:
    """Every process writes what it holds, at the same time."""
    import torch.distributed.checkpoint as dcp

    target = make_folder(folder / kind.folder_name(index))
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    writer = dcp.FileSystemWriter(target, sync_files=False)
    dcp.save({kind.key: collect()}, storage_writer=writer, no_dist=alone)
    names = [
        name for name in os.listdir(target) if name.startswith(f"__{rank}_") or (name == ".metadata" and rank == 0)
    ]
    return [f"{target.name}/{name}" for name in sorted(names)]


def _write_full(kind: StateKind, index: int, folder: Path, collect: Collect) -> list[str]:
    """The main process writes everything, tensors whole."""
    state = gather_on_first(collect())
    if dist.is_initialized() and dist.get_rank() != 0:
        return []
    return [_write_file(folder, kind.file_name(index), state)]


def _write_local(kind: StateKind, index: int, folder: Path, collect: Collect) -> list[str]:
    """Every process writes what it holds into a file by itself, to be read by as many processes only."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shapes: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
    parts = _own_parts(collect(), (), shapes)
    content = {"parts": parts, "shapes": shapes, "num_processes": world}
    return [_write_file(folder, kind.rank_file_name(index, rank), content)]


def _own_parts(value: Any, keys: tuple[str, ...], shapes: list[tuple[tuple[str, ...], tuple[int, ...]]]) -> Any:
    """A nested state with this process's part of every tensor; notes the shapes of the whole ones."""
    if isinstance(value, Mapping):
        return {key: _own_parts(inner, (*keys, str(key)), shapes) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        shapes.append((keys, tuple(value.shape)))
        return to_local(value).detach().cpu()
    return value


def _write_file(folder: Path, name: str, state: Any) -> str:
    check_loadable(state, f"The state for {name}")
    with write_atomically(folder / name) as file:
        serialize(state, file, False)
    return name


FORMS: dict[str, Callable[[StateKind, int, Path, Collect], list[str]]] = {
    "SHARDED_STATE_DICT": _write_sharded,
    "FULL_STATE_DICT": _write_full,
    "LOCAL_STATE_DICT": _write_local,
}


def write_model(model: nn.Module, folder: Path, form: str, index: int = 0, *, adapter_only: bool = False) -> list[str]:
    """Write a prepared model; all processes call this.

    Args:
        model: The model.
        folder: Where to; all processes see the same.
        form: A key of `FORMS`.
        index: Its position among the prepared models.
        adapter_only: Write only what is trainable, of a model with an adapter.

    Returns:
        Names of the files that this process wrote.

    Raises:
        OSError: Something could not be written.
    """

    def collect() -> dict[str, Any]:
        state = model_state(model)
        return {name: state[name] for name in trainable_names(model) if name in state} if adapter_only else state

    return FORMS[form](MODEL, index, folder, collect)


def write_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, form: str, index: int = 0
) -> list[str]:
    """Write the state of an optimizer; as `write_model`.

    Args:
        model: Whose parameters it has, as prepared.
        optimizer: The plain one.
        folder: Where to.
        form: A key of `FORMS`.
        index: Its position among the prepared optimizers.
    """
    return FORMS[form](OPTIMIZER, index, folder, lambda: optimizer_state(model, optimizer))


def write_states(models: Sequence[nn.Module], optimizers: Sequence[Any], folder: Path, form: str) -> list[str]:
    """Write all prepared models and optimizers; see `write_model`."""
    names = [name for index, model in enumerate(models) for name in write_model(model, folder, form, index)]
    for index, prepared in enumerate(optimizers):
        optimizer = getattr(prepared, "optimizer", prepared)
        names += write_optimizer(model_of(optimizer, models), optimizer, folder, form, index)
    return names


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters that are trained, as the user's model gives them."""
    return [plain_name(name) for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad]
