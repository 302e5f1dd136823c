"""The open accumulation window of a checkpoint: the gradients of its micro-batches so far, which differ on every rank.

A window is open between a micro-batch that is not a sync step and the next one that is. Engines that keep its gradients
where they can be read (`Engine.window_gradients`) resume it exactly; under the others its first micro-batches are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_integrations.checkpoints.pending import FileWriter
from accel_integrations.unwrap import extract_model_from_parallel
from accel_ops.filenames import WINDOW_NAME
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accelerate.checkpoint.run import Run


@dataclass(frozen=True)
class Window:
    """What was collected of an open accumulation window on one rank.

    Attributes:
        gradients: By index of the model and name of the parameter, as `"0.layer.weight"`.
        average: The state of `engine.averaging`.
    """

    gradients: dict[str, torch.Tensor]
    average: dict[str, Any]


def window_file(process_index: int) -> str:
    """The file of a rank's open window."""
    return f"{WINDOW_NAME}_{process_index}.bin"


def write_window(files: FileWriter, accelerator: Run) -> None:
    """Write the open accumulation window of this rank, if there is one.

    Under an engine that cannot, the main process warns.
    """
    if accelerator.engine.gradient_state.sync_gradients:
        return
    if not is_kept(accelerator):
        if accelerator.state.is_main_process:
            warn_user(
                f"save_state() was called inside a gradient accumulation window, and the {accelerator.engine.name!r} engine "
                "cannot save the gradients of its first micro-batches: a run that resumes here trains without them. "
                "Call save_state() where accelerator.sync_gradients is True."
            )
        return
    kept = accelerator.engine.window_gradients
    gradients = {
        f"{index}.{name}": gradient
        for index, model in enumerate(map(extract_model_from_parallel, accelerator._models))
        for name, gradient in (kept.read(model) if kept is not None else {}).items()
    }
    files.save(
        window_file(accelerator.state.process_index),
        {"gradients": gradients, "average": accelerator.engine.averaging.state_dict()},
    )


def read_window(
    names: Collection[str], read: Callable[[str], dict[str, Any]], process_index: int, count: int, world_size: int
) -> Window | None:
    """Read the open window of this rank; None if the checkpoint has none.

    Loaded by another number of ranks, each gets its part of all: what its loss would have added to the mean over ranks.

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
    found = [_checked(read(name), name) for name in map(window_file, ranks) if name in names]
    if not found:
        return None
    if len(found) == 1 and count == world_size:
        return found[0]
    share = 1 / (count if found[0].average.get("weighted") else len(found))
    gradients: dict[str, torch.Tensor] = {}
    for window in found:
        for name, gradient in window.gradients.items():
            gradients[name] = gradients[name] + gradient * share if name in gradients else gradient * share
    totals = [window.average["total"] for window in found if "total" in window.average]
    average = found[0].average | ({"total": sum(totals) * share} if totals else {})
    return Window(gradients, average)


def _checked(state: Mapping[str, Any], name: str) -> Window:
    gradients, average = state.get("gradients"), state.get("average")
    if (
        not isinstance(gradients, dict)
        or not isinstance(average, dict)
        or not all(map(torch.is_tensor, gradients.values()))
    ):
        raise ValueError(f"{name!r} is damaged: it holds no gradients. Load another checkpoint.")
    return Window(gradients, average)


def check_window(window: Window | None, accelerator: Run, where: str) -> None:
    """Check that the gradients fit the models, before anything changes.

    Raises:
        ValueError: Naming the first that does not.
    """
    if window is None or not is_kept(accelerator):
        return
    known = {
        f"{index}.{name}": parameter.shape
        for index, model in enumerate(map(extract_model_from_parallel, accelerator._models))
        for name, parameter in model.named_parameters()
    }
    for name, gradient in window.gradients.items():
        if name not in known or known[name] != gradient.shape:
            has = f"has shape {list(known[name])}" if name in known else "does not exist"
            raise ValueError(
                f"{where} was saved inside a gradient accumulation window, with a gradient of shape {list(gradient.shape)} for "
                f"{name!r}, which {has} here. Prepare the same models as when it was saved."
            )


def apply_window(window: Window | None, accelerator: Run) -> None:
    """Open the window of a checkpoint; without one, close whatever window was open.

    Under an engine that cannot open it, the main process warns.
    """
    engine, state = accelerator.engine, accelerator.engine.gradient_state
    if engine.window_gradients is None or not is_kept(accelerator):
        if window is not None and accelerator.state.is_main_process:
            warn_user(
                "The checkpoint was saved inside a gradient accumulation window, and the "
                f"{engine.name!r} engine cannot load the gradients of its first micro-batches: the run goes on without them. "
                "Save where accelerator.sync_gradients is True."
            )
        return
    if window is None and state.sync_gradients:
        return
    for index, model in enumerate(map(extract_model_from_parallel, accelerator._models)):
        own = {} if window is None else _of_model(window.gradients, index)
        engine.window_gradients.write(model, own)
    if window is not None:
        engine.averaging.load_state_dict(window.average)
    state._set_sync_gradients(window is None)


def is_kept(accelerator: Run) -> bool:
    """Whether a checkpoint of these models can hold an open window."""
    kept = accelerator.engine.window_gradients
    return kept is not None and all(kept.can_keep(extract_model_from_parallel(model)) for model in accelerator._models)


def _of_model(gradients: Mapping[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """The gradients of one model, by name of the parameter."""
    found = (name.partition(".") for name in gradients)
    return {name: gradients[f"{number}.{name}"] for number, _, name in found if number == str(index)}
