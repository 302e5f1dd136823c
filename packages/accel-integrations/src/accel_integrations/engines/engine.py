"""The interface of a training engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accel_data.sequence_shard import SequenceShard
from accel_integrations import gradients
from accel_integrations.averaging import StepAverage, WindowAverage
from accel_integrations.checkpoints.full_states import FullStatesLoad, FullStatesSave
from accel_integrations.checkpoints.pending import CheckpointFiles, PendingLoad, PendingSave, warn_of_unused
from accel_integrations.checkpoints.sharded_states import (
    ShardedStatesLoad,
    holds_shards,
    refuse_deepspeed_states,
    strict_of,
)
from accel_integrations.compile import compile_model, compile_regions_deepspeed
from accel_integrations.parallel.module_states import all_reduce_over_group
from accel_integrations.parallel.replicas import mean_over_tokens
from accel_integrations.precision.registry import make_precision
from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_integrations.unwrap import extract_model_from_parallel
from accel_ops.modules import has_compiled_regions, is_compiled_module
from accel_state.mesh import DataPlace
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from accel_integrations.precision.precision import Precision
    from accel_integrations.prepared.prepared import Prepared
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.gradient_state import GradientState
    from accel_state.settings.compile import TorchDynamoPlugin
    from accel_state.settings.handlers import Handlers


@dataclass(slots=True)
class EngineContext:
    """Everything an engine may ask about the run; one instance per accelerator."""

    state: AcceleratorState
    gradient_state: GradientState
    handlers: Handlers
    prepared: Prepared
    device_placement: bool = True
    step_scheduler_with_optimizer: bool = True
    split_batches: bool = False
    """True when a loader's batch is shared between the processes rather than multiplied by them."""


class Engine(ABC):
    """One training engine: wraps what was prepared and takes the steps.

    The bodies here are plain single-process PyTorch. A concrete engine is final (no engine inherits from another) and
    overrides what differs; reading its file shows exactly that difference.
    """

    name: ClassVar[str]
    accepts_transforms: ClassVar[bool] = True
    """False where the library behind the engine brings its own parallelism."""
    averages_parameters: ClassVar[bool] = False
    """True when replicas hold full parameters, so that `LocalSGD` may average them."""
    compiles_in_place: ClassVar[bool] = False
    """True where repeated blocks must stay the modules that they are, because the engine holds on to them."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.gradient_state = context.gradient_state
        self.precision: Precision = self.make_precision(context.state.mixed_precision)
        average_over = context.gradient_state.plugin_kwargs.get("average_over", "steps")
        self.averaging: StepAverage = (
            self.make_step_average()
            if average_over == "steps"
            else WindowAverage(self, context.prepared, average_over)
        )
        """How gradients are averaged over an accumulation window."""

    # ---- before anything starts ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse impossible combinations.

        Raises:
            ValueError: Naming the settings in conflict and the allowed ones.
        """

    def make_precision(self, wanted: str) -> Precision:
        """The precision object for `mixed_precision=wanted` under this engine.

        Raises:
            NotImplementedError: When there is none.
        """
        return make_precision(
            wanted, self.context.state.device.type, self.context.handlers, sharded=self.shards_gradients
        )

    @property
    def shards_gradients(self) -> bool:
        """Whether every process holds other parts of the gradients."""
        return False

    def data_place(self) -> DataPlace:
        """Which slice of the data this process reads."""
        state = self.context.state
        if state.parallelism_config is not None:
            return state.parallelism_config.data_place(state.process_index, state.num_processes)
        return DataPlace(state.process_index, state.num_processes)

    def make_step_average(self) -> StepAverage:
        """How losses are divided where each micro-batch counts the same."""
        return StepAverage(self.gradient_state)

    # ---- preparing ----------------------------------------------------------------------------------------------

    def before_prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Look at the objects of one `prepare` call together, before any of them is prepared.

        Args:
            objects: What the user gave.

        Returns:
            Those to prepare each on its own, in the same order, with None in the place of what this engine prepares
            itself in `after_prepare`.

        Raises:
            ValueError: For objects that do not go together.
        """
        return list(objects)

    def after_prepare(self, results: list[Any]) -> list[Any]:
        """Finish the objects of one `prepare` call together, after each of them was prepared.

        Args:
            results: What was made of the list that `before_prepare` returned.

        Returns:
            What `prepare` returns, in the same order.
        """
        return results

    @abstractmethod
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Place the model and wrap it for this training engine; `evaluation` models get no gradient machinery."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """Wrap an optimizer."""
        wrapped = AcceleratedOptimizer(optimizer, device_placement=device_placement, scaler=self.precision.scaler)
        wrapped.step_through(self.step, self.averaging.finish_window if self.averaging.is_by_window else None)
        self.precision.watch(optimizer)
        return wrapped

    def compile_model(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """Compile a prepared model as the settings say."""
        is_compiled = is_compiled_module(model) or has_compiled_regions(model)
        if self.compiles_in_place and plugin.use_regional_compilation and not is_compiled:
            compile_regions_deepspeed(model, **plugin.to_kwargs())
            return model
        return compile_model(model, plugin)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a learning-rate scheduler, tied to the prepared optimizers it drives."""
        prepared = self.context.prepared.optimizers
        driven = [optimizer for optimizer in prepared if getattr(scheduler, "optimizer", None) is optimizer.optimizer]
        return AcceleratedScheduler(
            scheduler,
            driven or prepared,
            step_with_optimizer=self.context.step_scheduler_with_optimizer,
            split_batches=self.context.split_batches,
        )

    def finish_loader(self, loader: Any) -> Any:
        """The last touch on a prepared data loader: each rank yields its shard of sequences along the mesh's "sp" axis."""
        state = self.context.state
        config = state.parallelism_config
        if config is not None and config.sp_enabled and state.device_mesh is not None:
            loader.sequence_shard = SequenceShard(state.device_mesh.get_local_rank("sp"), config.sp_size)
        return loader

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model that went into `prepare_model`."""
        return extract_model_from_parallel(model, keep_torch_compile=False)

    # ---- stepping -----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss` (0-dim, already divided for accumulation)."""
        self.precision.scale(loss).backward(**kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which `backward` exchanges no gradients."""
        return nullcontext()

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which `backward` averages gradients although the forward of `model` ran under `no_sync`."""
        return nullcontext()

    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """A context in which processes may run out of batches at different steps."""
        warn_user(
            f"Joining uneven inputs has no effect with the {self.name!r} engine: remove join_uneven_inputs, or launch "
            "more than one process."
        )
        return nullcontext()

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Take a step; False when it was skipped because gradients were not finite."""
        return self.precision.step(optimizer, closure)

    def unscale_gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Bring the gradients of plain torch optimizers back to scale 1, before clipping or reading them."""
        for optimizer in optimizers:
            self.precision.unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Scale gradients so that their joint norm is at most `max_norm`; returns the norm before (0-dim)."""
        return gradients.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient element to `[-clip_value, clip_value]`."""
        gradients.clip_grad_value_(parameters, clip_value)

    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Sum of a window's weight over the processes whose gradients are averaged (0-dim float32 in and out)."""
        return weight if self.num_averaged == 1 else all_reduce_over_group(weight, self.averaging_group)

    @property
    def num_averaged(self) -> int:
        """Over how many processes this engine averages gradients."""
        return 1

    @property
    def averaging_group(self) -> Any:
        """The process group in which this engine averages gradients; None for all processes."""
        config = self.context.state.parallelism_config
        mesh = None if config is None else config.axis_mesh("dp_cp")
        return None if mesh is None else mesh.get_group()

    def mean_over_tokens(self, loss: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
        """The mean loss (0-dim) over the tokens of all processes whose gradients are averaged."""
        if self.num_averaged == 1:
            return loss
        return mean_over_tokens(loss, num_tokens, self.averaging_group, self.num_averaged)

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all that checkpoints store of models and optimizers, and needs no other to write it."""
        return False

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole model's tensors under their plain names, on every process that needs them."""
        return self.unwrap(model).state_dict()

    def full_optimizer_state(self, optimizer: AcceleratedOptimizer) -> dict[str, Any]:
        """The state dict that the optimizer of the whole model would have; all processes must call this."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: AcceleratedOptimizer, state: dict[str, Any]) -> None:
        """Restore what `full_optimizer_state` returned, here or in a run of another size."""
        optimizer.load_state_dict(state)

    def own_optimizer_state(self, optimizer: AcceleratedOptimizer, state: dict[str, Any]) -> dict[str, Any]:
        """What of a state from `full_optimizer_state` is for the parameters that this rank has.

        Raises:
            ValueError: The state is that of an optimizer with other groups.
        """
        return state

    def check_storage(self, sees_main: bool, folder: Path) -> None:
        """Refuse a folder for checkpoints in which this engine could not write one.

        Args:
            sees_main: Whether this rank sees the files of rank 0.
            folder: Where the checkpoint is to be.

        Raises:
            ValueError: Saying what is needed.
        """

    def save(self, options: Mapping[str, Any]) -> PendingSave:
        """Collect the states of all prepared models and optimizers; all ranks call this.

        Args:
            options: The further arguments of `save_state`.

        Returns:
            What the checkpoint has written once hooks have seen the weights.
        """
        warn_of_unused(options)
        prepared = self.context.prepared
        weights = [self.full_state_dict(model) for model in prepared.models]
        return FullStatesSave(weights, [self.full_optimizer_state(optimizer) for optimizer in prepared.optimizers])

    def open(
        self,
        checkpoint: CheckpointFiles,
        location: torch.device,
        load_kwargs: Mapping[str, Any],
        model_kwargs: Mapping[str, Any],
    ) -> PendingLoad:
        """Read what prepared models and optimizers need of a checkpoint, changing nothing.

        Args:
            checkpoint: Its files, complete.
            location: The device on which the tensors of optimizers are while they are loaded.
            load_kwargs: Further arguments of `torch.load`.
            model_kwargs: The further arguments of `load_state`, for the models' `load_state_dict`.

        Returns:
            What compares the states with this run, and applies them.

        Raises:
            ValueError: The checkpoint is damaged, or was saved by an engine whose states this one cannot read.
        """
        refuse_deepspeed_states(checkpoint)
        prepared = self.context.prepared
        if holds_shards(checkpoint.names):
            return ShardedStatesLoad(checkpoint, prepared, strict_of(model_kwargs))
        return FullStatesLoad(checkpoint, prepared.optimizers, location, self, load_kwargs, model_kwargs)

    def forget(self) -> None:
        """Let go of what was prepared, beyond what the record of prepared objects holds."""

    def close(self) -> None:
        """Finish what needs the process group, which is about to end; must not wait for other processes."""
