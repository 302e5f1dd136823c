"""The open accumulation window of a checkpoint: the gradients of its micro-batches so far, which differ on every rank.

A window is open between a micro-batch that is not a sync step and the next one that is. Where full gradients accumulate in `.grad`
(one process, DDP, XLA), it is resumed exactly; under the other engines its first micro-batches are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from accel_integrations.training_state.interface import FileWriter
from accel_integrations.unwrap import extract_model_from_parallel
from accel_ops.files.filenames import WINDOW_NAME
from accel_ops.modules import to_local
from accel_state.gradient_state import GradientState
from accel_state.processes import PartialState
from accel_state.warning import warn_user


class Accumulating(Protocol):
    """The attributes of an engine that say how gradients accumulate."""

    averaging: Any
    gradient_state: GradientState

    @property
    def name(self) -> str:
        """The name that users give the engine."""
        ...

    @property
    def accumulates_in_grad(self) -> bool:
        """Whether the full gradients of a rank's own losses accumulate in `.grad`."""
        ...


@dataclass(frozen=True)
class Window:
    """What was collected of an open accumulation window on one rank.

    Attributes:
        gradients: Gradients, by index of the model and name of the parameter, as `"0.layer.weight"`.
        average: The state of `engine.averaging`.
    """

    gradients: dict[str, torch.Tensor]
    average: dict[str, Any]


def window_file(process_index: int) -> str:
    """The file of a rank's open window."""
    return f"{WINDOW_NAME}_{process_index}.bin"


def is_kept(engine: Accumulating, models: Iterable[nn.Module]) -> bool:
    """Whether a checkpoint of this run can hold an open window: every parameter is plain, and its gradient in `.grad`."""
    if not engine.accumulates_in_grad:
        return False
    return all(to_local(parameter) is parameter for parameter in _parameters(models).values())


def write_window(files: FileWriter, engine: Accumulating, models: Sequence[nn.Module], process_index: int) -> None:
    """Write the open accumulation window of this rank, if there is one.

    Under an engine that cannot, the main process warns.
    """
    if engine.gradient_state.sync_gradients:
        return
    if not is_kept(engine, models):
        if process_index == 0:
            warn_user(
                f"save_state() was called inside a gradient accumulation window. Its gradients are saved where parameters are not sharded "
                f"(one process, DDP, XLA), and not by the {engine.name!r} engine of this run: a run that resumes here trains without those of "
                "the first micro-batches. Call save_state() where accelerator.sync_gradients is True."
            )
        return
    gradients = {name: weight.grad for name, weight in _parameters(models).items() if weight.grad is not None}
    files.save(
        window_file(process_index),
        {"gradients": gradients, "average": engine.averaging.state_dict()},
    )


def read_window(
    names: Collection[str], read: Callable[[str], dict[str, Any]], process_index: int, count: int, world_size: int
) -> Window | None:
    """Read the open window of this rank; None if the checkpoint has none.

    Loaded by another number of ranks, each gets its share of all: what its loss would have added to the mean over ranks.

    Args:
        names: The files of the checkpoint.
        read: Reads one.
        process_index: Rank of this process.
        count: The number of ranks that load.
        world_size: The number of ranks that saved.

    Raises:
        ValueError: A file does not hold a window.
    """
    ranks = [process_index] if count == world_size else range(world_size)
    windows = [_checked(read(name), name) for name in map(window_file, ranks) if name in names]
    if not windows:
        return None
    if len(windows) == 1 and count == world_size:
        return windows[0]
    share = 1 / (count if windows[0].average.get("weighted") else len(windows))
    gradients: dict[str, torch.Tensor] = {}
    for window in windows:
        for name, gradient in window.gradients.items():
            gradients[name] = gradients[name] + gradient * share if name in gradients else gradient * share
    totals = [window.average["total"] for window in windows if "total" in window.average]
    average = windows[0].average | ({"total": sum(totals) * share} if totals else {})
    return Window(gradients, average)


def _checked(state: Mapping[str, Any], name: str) -> Window:
    gradients: Any = state.get("gradients")
    average: Any = state.get("average")
    if (
        not all(isinstance(each, dict) for each in (gradients, average))
        or not all(map(torch.is_tensor, gradients.values()))
        or "parts" in state
    ):
        raise ValueError(f"{name!r} is damaged: it holds no gradients. Load another checkpoint.")
    return Window(gradients, average)


def check_window(window: Window | None, engine: Accumulating, models: Sequence[nn.Module], where: str) -> None:
    """Check that the gradients fit the models, before anything changes.

    Raises:
        ValueError: Naming the first that does not.
    """
    if window is None or not is_kept(engine, models):
        return
    parameters = _parameters(models)
    for name, gradient in window.gradients.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            has = f"has shape {list(parameters[name].shape)}" if name in parameters else "does not exist"
            raise ValueError(
                f"{where} was saved inside a gradient accumulation window, with a gradient of shape "
                f"{list(gradient.shape)} for {name!r}, which {has} here. Prepare the same models as when it was saved."
            )


def apply_window(window: Window | None, engine: Accumulating, models: Sequence[nn.Module]) -> None:
    """Open the window of a checkpoint; without one, close whatever window was open.

    Under an engine that keeps gradients elsewhere it is left out, and the main process warns.
    """
    state = engine.gradient_state
    if window is None and state.sync_gradients:
        return
    if not is_kept(engine, models):
        if PartialState().is_main_process:
            warn_user(
                f"The {engine.name!r} engine cannot load the gradients of an accumulation window, nor drop those that have "
                "accumulated. Save and load states where accelerator.sync_gradients is True."
            )
        return
    for name, parameter in _parameters(models).items():
        gradient = None if window is None else window.gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
    if window is not None:
        engine.averaging.load_state_dict(window.average)
    state._set_sync_gradients(window is None)


def _parameters(models: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of all models, by the names of a window."""
    return {
        f"{index}.{name}": parameter
        for index, model in enumerate(map(extract_model_from_parallel, models))
        for name, parameter in model.named_parameters()
    }
