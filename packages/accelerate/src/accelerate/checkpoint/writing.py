"""Writing a training state: which object goes into which file, from which process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accel_data.epoch import Epoch
from accel_data.samplers import SeedableRandomSampler
from accel_integrations.training_state.interface import FileWriter
from accel_ops.files.filenames import (
    CUSTOM_OBJECT_NAME,
    DATALOADER_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    numbered,
)
from accel_ops.files.serialization import check_loadable
from accel_ops.random import capture_rng_state
from accelerate.checkpoint.manifest import TOKEN_KEY

if TYPE_CHECKING:
    from accelerate.interface import AcceleratorInterface


def schedulers_with_files(accelerator: AcceleratorInterface) -> list[Any]:
    """The schedulers whose state no engine saves; programs may have added plain ones."""
    return [scheduler for scheduler in accelerator._schedulers if getattr(scheduler, "has_own_file", True)]


def write_shared_state(
    files: FileWriter, schedulers: Iterable[Any], dataloaders: Iterable[Any], scale: Mapping[str, Any] | None = None
) -> None:
    """Write the state that is replicated on all ranks besides models and optimizers: schedulers, samplers, loss scale.

    Args:
        files: Where to.
        schedulers: With `state_dict()`.
        dataloaders: Prepared loaders.
        scale: The state of the precision, None where it has none.

    Raises:
        TypeError: Some state could not be loaded again without running code from the file.
    """
    for index, scheduler in enumerate(schedulers):
        name = numbered(f"{SCHEDULER_NAME}.bin", index)
        state = scheduler.state_dict()
        check_loadable(state, f"The state_dict() for {name}")
        files.save(name, state)
    for index, loader in enumerate(dataloaders):
        if (order := order_state(loader)) is not None:
            files.save(numbered(f"{SAMPLER_NAME}.bin", index), order)
    if scale is not None:
        files.save(SCALER_NAME, scale)


def write_own_state(
    files: FileWriter, dataloaders: Iterable[Any], process_index: int, step: int, token: str = ""
) -> None:
    """Write the state that is different on each rank: RNG states, and the positions of its data loaders.

    Args:
        files: Where to.
        dataloaders: Prepared loaders.
        process_index: Rank of this process.
        step: The step counter to keep.
        token: The checkpoint's token, when its manifest already exists. The file with it is written last.
    """
    for index, loader in enumerate(dataloaders):
        if (position := loader_position(loader)) is not None:
            check_loadable(position, f"The position of data loader {index}")
            files.save(position_file(index, process_index), position)
    late = {TOKEN_KEY: token} if token else {}
    reading = {READING_KEY: states} if (states := reading_states(dataloaders)) else {}
    files.save(random_states_file(process_index), {"step": step, **late, **reading, **capture_rng_state()})


def write_custom_object(files: FileWriter, obj: Any, index: int) -> None:
    """Write the state of an object that was registered for checkpoints.

    Raises:
        TypeError: It could not be loaded again without running code from the file.
    """
    state = obj.state_dict()
    check_loadable(state, f"The state_dict() of the registered object {index} ({type(obj).__name__})")
    files.save(custom_object_file(index), state)


def custom_object_file(index: int) -> str:
    """The file of a registered object."""
    return f"{CUSTOM_OBJECT_NAME}_{index}.pkl"


def random_states_file(process_index: int) -> str:
    """The file of the RNG states of a process."""
    return f"{RNG_STATE_NAME}_{process_index}.pkl"


def position_file(index: int, process_index: int) -> str:
    """The file with the position of the loader at `index`. accelerate 1.15 reads that of process 0 on all processes."""
    suffix = f"_rank{process_index}" if process_index else ""
    return numbered(f"{DATALOADER_NAME}.bin", index).replace(".bin", f"{suffix}.bin")


READING_KEY = "reading"
"""The key of a process's `reading_states` in the file of its random states."""


def loader_position(loader: Any) -> dict[str, Any] | None:
    """Torchdata's position of this process in a loader; None for loaders that read without it."""
    return loader.state_dict() if getattr(loader, "keeps_position", False) else None


def order_state(loader: Any) -> dict[str, Any] | None:
    """What the order of a loader's samples depends on, and its position; None where they are unknown."""
    epoch = _epoch_of(loader)
    if epoch is None:  # not prepared here
        has_epochs = callable(getattr(getattr(loader, "dataset", None), "set_epoch", None))
        return {"iteration": getattr(loader, "iteration", 0)} if has_epochs else None
    state: dict[str, Any] = epoch.state_dict(loader)
    sampler = _seedable_sampler(loader)
    if sampler is not None:
        state |= {"initial_seed": sampler.initial_seed, "epoch": state["iteration"]}
    return state


def reading_states(loaders: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """The random states from which this process and its workers read on in each loader, by index."""
    epochs = {
        index: (loader, epoch) for index, loader in enumerate(loaders) if (epoch := _epoch_of(loader)) is not None
    }
    states = {index: epoch.reading_state(loader) for index, (loader, epoch) in epochs.items()}
    return {index: state for index, state in states.items() if state}


def restore_reading(loader: Any, states: dict[str, Any]) -> None:
    """Have the first batch of the continued epoch read from these states."""
    epoch = _epoch_of(loader)
    if epoch is not None:
        epoch.restore_reading(loader, states)


def restore_order(loader: Any, state: dict[str, Any]) -> None:
    """Restore the order and the position that `order_state` described.

    Args:
        loader: The loader to restore.
        state: What `order_state` returned.
    """
    sampler = _seedable_sampler(loader)
    if sampler is not None and "initial_seed" in state:
        sampler.initial_seed, sampler.epoch = state["initial_seed"], state["epoch"]
    epoch = _epoch_of(loader)
    if epoch is None:
        loader.iteration = state["iteration"]
    else:
        epoch.restore(loader, state)


def _epoch_of(loader: Any) -> Epoch | None:
    epoch = getattr(loader, "epoch", None)
    return epoch if isinstance(epoch, Epoch) else None


def _seedable_sampler(loader: Any) -> SeedableRandomSampler | None:
    sampler = loader.get_sampler() if callable(getattr(loader, "get_sampler", None)) else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
