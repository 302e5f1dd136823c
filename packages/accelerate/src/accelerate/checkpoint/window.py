"""The open accumulation window of a checkpoint: the gradients of its micro-batches so far, which differ on every rank.

A window is open between a micro-batch that is not a sync step and the next one that is. Engines that keep its gradients
where they can be read (`Engine.window_gradients`) resume it exactly; under the others its first micro-batches are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accel_integrations.checkpoints.pending import FileWriter
from accel_integrations.engines.windows import Places
from accel_integrations.unwrap import extract_model_from_parallel
from accel_ops.filenames import WINDOW_NAME
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accelerate.checkpoint.run import Run


@dataclass(frozen=True)
class Window:
    """What was collected of an open accumulation window on one rank.

    Attributes:
        gradients: Whole gradients, by index of the model and name of the parameter, as `"0.layer.weight"`.
        average: The state of `engine.averaging`.
        parts: Parts of gradients, by index of the model and name of the part.
        arrangement: Of the ranks that have these parts (`Engine.arrangement`); None where all gradients are whole.
    """

    gradients: dict[str, torch.Tensor]
    average: dict[str, Any]
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    arrangement: dict[str, Any] | None = None


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
    window = _collect(accelerator)
    state = {"gradients": window.gradients, "average": window.average}
    if window.arrangement is not None:
        state |= {"parts": window.parts, "arrangement": window.arrangement}
    files.save(window_file(accelerator.state.process_index), state)


def _collect(accelerator: Run) -> Window:
    whole, parts = (
        {name: gradient for name, place in places.items() if (gradient := place.get()) is not None}
        for places in _places(accelerator)
    )
    has_parts = bool(parts) or not _takes_whole(accelerator)
    arrangement = accelerator.engine.arrangement() if has_parts else None
    return Window(whole, accelerator.engine.averaging.state_dict(), parts, arrangement)


def read_window(
    names: Collection[str], read: Callable[[str], dict[str, Any]], process_index: int, count: int, world_size: int
) -> Window | None:
    """Read the open window of this rank; None if the checkpoint has none.

    Of whole gradients, loaded by another number of ranks, each gets its share of all: what its loss would have added to the
    mean over ranks.

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
    if found[0].arrangement is not None or (len(found) == 1 and count == world_size):
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
    gradients: Any = state.get("gradients")
    average: Any = state.get("average")
    parts: Any = state.get("parts", {})
    arrangement: Any = state.get("arrangement")
    if (
        not all(isinstance(each, dict) for each in (gradients, average, parts))
        or not isinstance(arrangement, dict | None)
        or not all(map(torch.is_tensor, (gradients | parts).values()))
    ):
        raise ValueError(f"{name!r} is damaged: it holds no gradients. Load another checkpoint.")
    return Window(gradients, average, parts, arrangement)


def check_window(window: Window | None, accelerator: Run, where: str) -> None:
    """Check that the gradients fit the models, before anything changes.

    Raises:
        ValueError: Naming the first that does not.
    """
    if window is None or not _fits(window, accelerator):
        return
    for kept, places in zip((window.gradients, window.parts), _places(accelerator), strict=True):
        for name, gradient in kept.items():
            if name not in places or places[name].shape != gradient.shape:
                has = f"has shape {list(places[name].shape)}" if name in places else "does not exist"
                raise ValueError(
                    f"{where} was saved inside a gradient accumulation window, with a gradient of shape "
                    f"{list(gradient.shape)} for {name!r}, which {has} here. Prepare the same models as when it was saved."
                )


def apply_window(window: Window | None, accelerator: Run) -> None:
    """Open the window of a checkpoint; without one, close whatever window was open.

    One that does not fit is left out, and the main process warns.
    """
    engine, state = accelerator.engine, accelerator.engine.gradient_state
    if window is not None and not _fits(window, accelerator):
        if accelerator.state.is_main_process:
            warn_user(_why_left_out(window, engine))
        window = None
    kept = engine.window_gradients
    if kept is None or (window is None and state.sync_gradients):
        return
    models = [extract_model_from_parallel(model) for model in accelerator._models]
    for model in models:
        kept.clear(model)
    if window is not None:
        for gradients, places in zip((window.gradients, window.parts), _places(accelerator), strict=True):
            for name, gradient in gradients.items():
                places[name].put(gradient)
        for model in models:
            kept.note_put(model)
        engine.averaging.load_state_dict(window.average)
    state._set_sync_gradients(window is None)


def is_kept(accelerator: Run) -> bool:
    """Whether a checkpoint of this run can hold an open window."""
    return accelerator.engine.window_gradients is not None


def _fits(window: Window, accelerator: Run) -> bool:
    if window.arrangement is None:
        return _takes_whole(accelerator)
    return is_kept(accelerator) and window.arrangement == accelerator.engine.arrangement()


def _takes_whole(accelerator: Run) -> bool:
    kept = accelerator.engine.window_gradients
    return kept is not None and all(kept.takes_whole(extract_model_from_parallel(one)) for one in accelerator._models)


def _why_left_out(window: Window, engine: Engine) -> str:
    said = "The checkpoint was saved inside a gradient accumulation window, "
    if window.arrangement is not None and engine.window_gradients is not None:
        then, now = (
            ", ".join(f"{name}={value}" for name, value in each.items())
            for each in (window.arrangement, engine.arrangement())
        )
        said += f"by ranks that each hold parts of its gradients ({then}), which these ({now}) cannot use"
    else:
        said += f"and the {engine.name!r} engine cannot load the gradients of its first micro-batches"
    return f"{said}: the run goes on without them. Save where accelerator.sync_gradients is True."


def _places(accelerator: Run) -> tuple[Places, Places]:
    """Where whole gradients and parts of gradients of all models are, by the names of a window."""
    whole: Places = {}
    parts: Places = {}
    kept = accelerator.engine.window_gradients
    for index, model in enumerate(map(extract_model_from_parallel, accelerator._models)):
        if kept is not None:
            whole |= {f"{index}.{name}": place for name, place in kept.whole(model).items()}
            parts |= {f"{index}.{name}": place for name, place in kept.parts(model).items()}
    return whole, parts
