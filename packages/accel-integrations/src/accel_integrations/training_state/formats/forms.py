"""Writing the states of sharded models and optimizers, in one of three forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.full_state import unshard_state_dict
from accel_integrations.prepared.parameters import plain_name
from accel_integrations.training_state.interface import FileWriter
from accel_ops.files.filenames import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_ops.files.serialization import check_loadable
from accel_ops.modules import full_tensor, is_compiled_module, to_local


@dataclass(frozen=True, slots=True)
class StateKind:
    """A kind of state: model or optimizer.

    Attributes:
        key: Its top-level key in a sharded checkpoint.
        stem: The beginning of its file names.
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
        """The file of one rank for the object at `index`, in the local form."""
        return f"{self.stem}_{index}_rank{rank}.bin" if index else f"{self.stem}_rank{rank}.bin"


MODEL = StateKind("model", FSDP_MODEL_NAME)
OPTIMIZER = StateKind("optimizer", OPTIMIZER_NAME)


# ---- states of this rank --------------------------------------------------------------------------------------------


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of a prepared model on this rank, under the names of the user's model.

    Args:
        model: The prepared model. Sharded parameters are returned as DTensors.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(without_compilation(model))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer on this rank, by parameter names.

    Args:
        model: The prepared model, with all parameters that the optimizer has.
        optimizer: The plain optimizer.

    Returns:
        `{"state": {parameter name: {...}}, "param_groups": [{"params": [parameter name, ...], ...}]}`.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(without_compilation(model), optimizer)


def without_compilation(model: Any) -> nn.Module:
    """The model inside what `torch.compile` returned, or the model itself."""
    module: nn.Module = model._orig_mod if is_compiled_module(model) else model
    return module


def full_model_state(model: nn.Module) -> dict[str, Any]:
    """A model's full state dict in CPU memory on the main process, on the meta device on other ranks; all ranks call this.

    Tensors are all-gathered one at a time; only the main process keeps them. Tied parameters are one tensor.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    sharded = model_state(model)
    state = unshard_state_dict(sharded, keep=is_first)
    if not is_first:  # libraries that save look up names on every rank
        return {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in sharded.items()
        }
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def gather_on_first(value: Any) -> Any:
    """A nested state with full tensors in CPU memory on the main process; empty dicts on other ranks."""
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
        ValueError: When its parameters do not all belong to one of the models.
    """
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if parameters <= set(model.parameters()):
            return model
    raise ValueError(
        f"{type(optimizer).__name__} has parameters that do not all belong to one prepared model, so its state cannot "
        "be saved by parameter name. Prepare its model, and use a separate optimizer for each model."
    )


# ---- forms ----------------------------------------------------------------------------------------------------------

Collect = Callable[[], Any]


def _write_sharded(kind: StateKind, index: int, files: FileWriter, collect: Collect) -> None:
    """Every rank writes its shards, at the same time."""
    files.save_sharded(kind.folder_name(index), {kind.key: collect()})


def _write_full(kind: StateKind, index: int, files: FileWriter, collect: Collect) -> None:
    """The main process writes the full state."""
    state = gather_on_first(collect())
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write_file(files, kind.file_name(index), state)


def _write_local(kind: StateKind, index: int, files: FileWriter, collect: Collect) -> None:
    """Every rank writes its shards into its own file, which only as many ranks can read again."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shapes: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
    parts = _local_shards(collect(), (), shapes)
    content = {"parts": parts, "shapes": shapes, "num_processes": world}
    _write_file(files, kind.rank_file_name(index, rank), content)


def _local_shards(value: Any, keys: tuple[str, ...], shapes: list[tuple[tuple[str, ...], tuple[int, ...]]]) -> Any:
    """A nested state with this rank's shard of every tensor; adds the full shapes to `shapes`."""
    if isinstance(value, Mapping):
        return {key: _local_shards(inner, (*keys, str(key)), shapes) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        shapes.append((keys, tuple(value.shape)))
        return to_local(value).detach().cpu()
    return value


def _write_file(files: FileWriter, name: str, state: Any) -> None:
    check_loadable(state, f"The state for {name}")
    files.save(name, state)


FORMS: dict[str, Callable[[StateKind, int, FileWriter, Collect], None]] = {
    "SHARDED_STATE_DICT": _write_sharded,
    "FULL_STATE_DICT": _write_full,
    "LOCAL_STATE_DICT": _write_local,
}


def write_model(model: nn.Module, files: FileWriter, form: str, index: int = 0, *, adapter_only: bool = False) -> None:
    """Write a prepared model; all ranks call this.

    Args:
        model: The model.
        files: Takes the files; in a folder that all ranks share.
        form: A key of `FORMS`.
        index: Its position among the prepared models.
        adapter_only: Write only trainable parameters, those of an adapter.

    Raises:
        OSError: Something could not be written.
    """

    def collect() -> dict[str, Any]:
        state = model_state(model)
        return {name: state[name] for name in trainable_names(model) if name in state} if adapter_only else state

    FORMS[form](MODEL, index, files, collect)


def write_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, files: FileWriter, form: str, index: int = 0
) -> None:
    """Write the state of an optimizer; as `write_model`.

    Args:
        model: The prepared model whose parameters it has.
        optimizer: The plain optimizer.
        files: Takes the files; in a folder that all ranks share.
        form: A key of `FORMS`.
        index: Its position among the prepared optimizers.
    """
    FORMS[form](OPTIMIZER, index, files, lambda: optimizer_state(model, optimizer))


def write_states(models: Sequence[nn.Module], optimizers: Sequence[Any], files: FileWriter, form: str) -> None:
    """Write all prepared models and optimizers; see `write_model`."""
    for index, model in enumerate(models):
        write_model(model, files, form, index)
    for index, prepared in enumerate(optimizers):
        optimizer = getattr(prepared, "optimizer", prepared)
        write_optimizer(model_of(optimizer, models), optimizer, files, form, index)


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters with `requires_grad`, as in the user's model."""
    return [
        plain_name(name) for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad
    ]
