"""`AcceleratedScheduler`: a learning-rate scheduler that keeps pace with the optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_state.accelerator_state import AcceleratorState
from accel_state.gradient_state import GradientState
from accel_state.processes import PartialState
from accel_state.public_names import known_as


@known_as("accelerate.scheduler.AcceleratedScheduler")
class AcceleratedScheduler:
    """Wraps a scheduler written for one process: it steps when its optimizers step, once per rank with its own batch.

    A call with arguments, such as the metric of an epoch (`ReduceLROnPlateau`) or the epoch itself, is passed on once.

    Args:
        scheduler (`torch.optim.lr_scheduler.LRScheduler`): The scheduler.
        optimizers (optimizer or list of them): The prepared optimizers whose steps count.
        step_with_optimizer (`bool`): False steps it whenever `step` is called.
        split_batches (`bool`): Whether a loader's batch is split between processes, so that one step is one batch.

    Attributes:
        scheduler: The wrapped scheduler.
        has_own_file: Whether checkpoints hold its state in a file of its own, rather than in that of an engine.
    """

    scheduler: Any
    optimizers: Sequence[Any]
    split_batches: bool
    step_with_optimizer: bool
    gradient_state: GradientState

    has_own_file = True
    num_devices: int = 1
    """How many devices of each process compute on different batches."""

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self._join_this_process()

    def _join_this_process(self) -> None:
        self.gradient_state = GradientState()
        self._steps_per_call = 1 if self.split_batches else _num_batches_at_a_time() * self.num_devices

    def count_devices(self, num_devices: int) -> None:
        """Step for the batches of that many devices of each process."""
        self.num_devices = num_devices
        self._join_this_process()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, in the state of this process."""
        self.__dict__.update(state)
        self._join_this_process()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as often as a run of one process would for the same data."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if args or kwargs:
            # What a program says once counts once; after an epoch also where the last accumulation window is still open.
            if not self.gradient_state.is_accumulating:
                self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        last = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._steps_per_call):
            if last is None or self.scheduler._step_count <= last:  # a schedule of fixed length stays at its end
                self.scheduler.step()

    def get_last_lr(self) -> Any:
        """The learning rates now, one for each group of parameters."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        """As of the wrapped scheduler."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped scheduler."""
        return self.scheduler.print_lr(*args, **kwargs)


def _num_batches_at_a_time() -> int:
    """Number of ranks that read different batches."""
    num_processes = PartialState().num_processes
    config = AcceleratorState._shared_state.get("parallelism_config")
    return num_processes if config is None else config.data_shard(0, num_processes).count
