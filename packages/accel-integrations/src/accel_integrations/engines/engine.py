"""The interface of a training engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accel_integrations import gradients
from accel_integrations.averaging import StepAverage, WindowAverage
from accel_integrations.compile import compile_model, compile_regions_deepspeed
from accel_integrations.parallel.module_states import all_reduce_over_group
from accel_integrations.parallel.replicas import mean_over_tokens
from accel_integrations.precision.registry import make_precision
from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_integrations.unwrap import extract_model_from_parallel
from accel_ops.modules import has_compiled_regions, is_compiled_module, to_local
from accel_state.mesh_axes import DataShard
from accel_state.weak import Weak

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.utils.data import DataLoader

    from accel_integrations.precision.precision import Precision
    from accel_integrations.prepared.prepared import Prepared
    from accel_integrations.training_state.interface import LoadRequest, PendingLoad, PendingSave
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.gradient_state import GradientState
    from accel_state.settings.compile import TorchDynamoPlugin
    from accel_state.settings.data import DataLoaderConfiguration
    from accel_state.settings.handlers import Handlers


@dataclass(slots=True)
class EngineContext:
    """Everything an engine may ask about the run; one instance per accelerator."""

    state: AcceleratorState
    gradient_state: GradientState
    handlers: Handlers
    record: Prepared | Weak[Prepared]
    """Weak where something else owns it: prepared optimizers, which are in it, refer to their engine."""
    device_placement: bool = True
    step_scheduler_with_optimizer: bool = True
    split_batches: bool = False
    """True when each batch of a loader is split between the processes, rather than read once per process."""
    already_sharded: bool = False
    """True when the program has sharded its loaders, whose lengths count each process's own batches."""
    keeps_full_states: bool = True
    """False while other ranks than this one gather full states."""

    @property
    def prepared(self) -> Prepared:
        """The record of everything that came through `prepare`."""
        return self.record.get() if isinstance(self.record, Weak) else self.record


class Engine(ABC):
    """One training engine: wraps models, optimizers and schedulers, and takes the optimizer steps.

    What would train each rank by itself if it were forgotten is abstract. The other bodies here are plain single-process PyTorch. A
    concrete engine is final (no engine inherits from another) and overrides what differs; reading its file shows exactly that
    difference. One that adds to another is a `DelegatingEngine`.
    """

    name: ClassVar[str]
    accepts_transforms: ClassVar[bool] = True
    """Whether `Transform`s apply; False where the library behind the engine brings its own parallelism."""
    allows_local_sgd: ClassVar[bool] = False
    """True when replicas hold full parameters, so that `LocalSGD` may average them."""
    accumulates_in_grad: ClassVar[bool] = False
    """True where a rank accumulates the full gradients of its own losses in `.grad`, so that checkpoints may hold an open window."""
    steps_torch_optimizers: ClassVar[bool] = True
    """Whether the optimizers that were prepared take the steps; False where a library makes others of them."""
    dispatches_streams: ClassVar[bool] = True
    """Whether one process may read a stream for all of them, which is the default for streams that cannot be sharded."""
    unguarded_because: ClassVar[str] = ""
    """Why `FiniteGradientsKwargs` is refused; empty where it is not."""
    clips_only_finite = False
    """Whether clipping leaves gradients as they are where their norm is inf or NaN, so that they can be named."""
    compiles_in_place: ClassVar[bool] = False
    """True where repeated blocks must be compiled in place, because the engine keeps references to these modules."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.gradient_state = context.gradient_state
        self.precision: Precision = self.make_precision(context.state.mixed_precision)
        average_over = context.gradient_state.plugin_kwargs.get("average_over", "steps")
        self.averaging: StepAverage = (
            self.make_step_average() if average_over == "steps" else WindowAverage(self, context, average_over)
        )
        """How gradients are averaged over an accumulation window."""

    # ---- before anything starts ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the settings can be combined under this engine.

        Raises:
            ValueError: They cannot; the message names the conflict and the allowed settings.
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
        """Whether every rank holds a different shard of the gradients."""
        return False

    def data_shard(self) -> DataShard:
        """Which slice of the data this process reads."""
        state = self.context.state
        if state.parallelism_config is not None:
            return state.parallelism_config.data_shard(state.process_index, state.num_processes)
        return DataShard(state.process_index, state.num_processes)

    @property
    def readers(self) -> Any:
        """The process group of ranks that read different batches, where `parallelism_config` does not say it; else None."""
        return None

    def make_step_average(self) -> StepAverage:
        """How losses are divided where every micro-batch has the same weight."""
        return StepAverage(self.gradient_state)

    # ---- preparing ----------------------------------------------------------------------------------------------

    def before_prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Look at the objects of one `prepare` call together, before any of them is prepared.

        Args:
            objects: What the user gave.

        Returns:
            The objects to prepare one by one, in the same order; None replaces each one that this engine prepares
            itself in `after_prepare`.

        Raises:
            ValueError: For objects that cannot be prepared together.
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

    def check_model(self, model: nn.Module) -> None:
        """Check a model before anything of it is changed.

        Raises:
            ValueError: It arrives sharded over other ranks than those of this run.
        """
        state = self.context.state
        if state.num_processes > 1:
            from accel_integrations.parallel.tensor import check_ranks_of

            check_ranks_of(model, self.data_shard().count, state.num_processes)

    @abstractmethod
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Move the model to its device and wrap it for this engine; models for `evaluation` get no gradient hooks."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """Wrap an optimizer."""
        wrapped = AcceleratedOptimizer(optimizer, device_placement=device_placement, scaler=self.precision.scaler)
        wrapped.step_through(self.step, self.averaging.finish_window if self.averaging.is_by_window else None)
        self.precision.watch(optimizer)
        return wrapped

    def flattens_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ranks hold flat shards of the parameters of a plain optimizer, without their shapes."""
        return False

    def compile_model(self, model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
        """Compile a prepared model with `torch.compile`, as the plugin configures it."""
        is_compiled = is_compiled_module(model) or has_compiled_regions(model)
        if self.compiles_in_place and plugin.use_regional_compilation and not is_compiled:
            compile_regions_deepspeed(model, **plugin.to_kwargs())
            return model
        return compile_model(model, plugin)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a learning-rate scheduler, which steps together with the prepared optimizers that it belongs to."""
        prepared = self.context.prepared.optimizers
        driven = [optimizer for optimizer in prepared if getattr(scheduler, "optimizer", None) is optimizer.optimizer]
        return AcceleratedScheduler(
            scheduler,
            driven or prepared,
            step_with_optimizer=self.context.step_scheduler_with_optimizer,
            split_batches=self.context.split_batches or self.context.already_sharded,
        )

    def start_loader(self, loader: DataLoader[Any], settings: DataLoaderConfiguration) -> DataLoader[Any]:
        """The data loader of which this process reads its shard, before it is prepared.

        Args:
            loader: The user's.
            settings: How data loaders shard their data over the ranks.

        Raises:
            ValueError: It cannot be read so.
        """
        return loader

    def finish_loader(self, loader: Any) -> Any:
        """Finish a prepared data loader: each rank yields its shard of the sequences along the "sp" mesh dimension."""
        state = self.context.state
        config = state.parallelism_config
        if config is not None and config.sp_enabled and state.device_mesh is not None:
            from accel_data.sequence_shard import SequenceShard

            loader.sequence_shard = SequenceShard(state.device_mesh.get_local_rank("sp"), config.sp_size)
        return loader

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model that was passed to `prepare_model`, without wrappers."""
        return extract_model_from_parallel(model, keep_torch_compile=False)

    # ---- stepping -----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss` (0-dim, already divided for accumulation)."""
        precision = self.precision
        (precision.scale(loss) if precision.scales else loss).backward(**kwargs)

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which `backward` synchronizes no gradients between ranks."""

    @abstractmethod
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which `backward` averages gradients although the forward pass of `model` ran under `no_sync`."""

    @abstractmethod
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """A context in which processes may run out of batches at different steps."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Take an optimizer step; returns False when it was skipped because gradients were not finite."""
        if self.precision.scales:
            return self.precision.step(optimizer, closure)
        optimizer.step(closure) if closure is not None else optimizer.step()
        return True

    def unscale_gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Divide the gradients of plain torch optimizers by the loss scale, before clipping or reading them."""
        if self.precision.scales:
            for optimizer in optimizers:
                self.precision.unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the total gradient norm to `max_norm`; returns the norm before clipping (0-dim float32)."""
        return gradients.clip_grad_norm_(parameters, max_norm, norm_type, self.clips_only_finite)

    def named_gradients(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients of a wrapped model that this rank holds (shards where it has shards), by names as in one process."""
        from accel_integrations.prepared.parameters import plain_name

        for name, parameter in self.unwrap(model).named_parameters():
            if parameter.grad is not None:
                yield plain_name(name), to_local(parameter.grad)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient element to `[-clip_value, clip_value]`."""
        gradients.clip_grad_value_(parameters, clip_value)

    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """All-reduce a window's weight over the ranks that average gradients (0-dim float32 in and out)."""
        return weight if self.num_averaged == 1 else all_reduce_over_group(weight, self.averaging_group)

    @property
    @abstractmethod
    def num_averaged(self) -> int:
        """Number of ranks over which this engine averages gradients."""

    @property
    def averaging_group(self) -> Any:
        """The process group over which this engine averages gradients; None for all ranks."""
        config = self.context.state.parallelism_config
        mesh = None if config is None else config.axis_mesh("dp_cp")
        return None if mesh is None else mesh.get_group()

    def mean_over_tokens(self, loss: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
        """The mean loss (0-dim) over the tokens of all ranks that average gradients."""
        if self.num_averaged == 1:
            return loss
        return mean_over_tokens(loss, num_tokens, self.averaging_group, self.num_averaged)

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    def sharded_form(self) -> Any:
        """How sharded states are written: a key of `formats.forms.FORMS`, or torch's enum member of that name; None for full states."""
        return None

    @property
    @abstractmethod
    def is_replicated(self) -> bool:
        """Whether every rank holds the full states of models and optimizers.

        The main process may then call `save_state` and `save_model` alone: `save` and `full_state_dict` must not wait for other ranks.
        """

    @contextmanager
    def keeping_full_states(self, keep: bool) -> Iterator[None]:
        """A context in which this rank may take part in gathering full states without keeping any.

        Args:
            keep: Whether `full_state_dict` and `full_optimizer_state` are needed on this rank. Where they are not, and
                their tensors are sharded, both return empty dicts.
        """
        before, self.context.keeps_full_states = self.context.keeps_full_states, keep
        try:
            yield
        finally:
            self.context.keeps_full_states = before

    @abstractmethod
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The full state dict of a model, without wrapper prefixes in names, on every rank that needs it."""

    def sharded_weights(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """The state dict of a model with this rank's shards as DTensors, under the names of `full_state_dict`.

        Returns:
            None where ranks hold something else, so that weights must be gathered to be saved.
        """
        return None

    def full_optimizer_state(self, optimizer: AcceleratedOptimizer) -> dict[str, Any]:
        """The full state dict of an optimizer, as in a run of one process; all ranks must call this."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: AcceleratedOptimizer, state: dict[str, Any]) -> None:
        """Load what `full_optimizer_state` returned, in this run or in one with another number of ranks."""
        optimizer.load_state_dict(state)

    def own_optimizer_state(self, optimizer: AcceleratedOptimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The entries of a state from `full_optimizer_state` for the parameters that this rank holds.

        Raises:
            ValueError: The state is that of an optimizer with other parameter groups.
        """
        return state

    def built_names(self, optimizer: torch.optim.Optimizer) -> Sequence[Sequence[str]] | None:
        """Names of the parameters in each group of a plain optimizer as the program built it.

        Full states store parameters by their place in this order.

        Returns:
            None where the optimizer still has these parameters, in this order.
        """
        return None

    def check_storage(self, sees_main: bool, folder: Path) -> None:
        """Check that this engine can write a checkpoint into a folder.

        Args:
            sees_main: Whether this rank sees the files of rank 0.
            folder: The folder of the checkpoint.

        Raises:
            ValueError: It cannot; the message says what is needed.
        """
        if self.sharded_form is not None:
            from accel_integrations.training_state.formats.sharded import check_shared_folder

            check_shared_folder(sees_main, folder)

    def save(self, options: Mapping[str, Any]) -> PendingSave:
        """Collect the states of all prepared models and optimizers; all ranks call this.

        Args:
            options: The extra keyword arguments of `save_state`.

        Returns:
            The collected states, which the checkpoint writes after its hooks have run.
        """
        # Storage is imported where something is stored: making an accelerator does not pay for it.
        from accel_integrations.training_state.formats.full import FullStatesSave
        from accel_integrations.training_state.formats.sharded import ShardedStatesSave
        from accel_integrations.training_state.interface import warn_of_unused

        warn_of_unused(options)
        prepared = self.context.prepared
        if self.sharded_form is not None:
            return ShardedStatesSave(prepared, self.sharded_form)
        weights = [self.full_state_dict(model) for model in prepared.models]
        return FullStatesSave(weights, [self.full_optimizer_state(optimizer) for optimizer in prepared.optimizers])

    def open(self, request: LoadRequest) -> PendingLoad:
        """Read the states of prepared models and optimizers from a checkpoint, without changing them.

        Args:
            request: The checkpoint, and how to load it.

        Returns:
            The states, to be compared with this run and then loaded.

        Raises:
            ValueError: The checkpoint is damaged, or was saved by an engine whose states this one cannot read.
        """
        from accel_integrations.training_state.formats.full import FullStatesLoad
        from accel_integrations.training_state.formats.sharded import ShardedStatesLoad, is_by_name

        prepared = self.context.prepared
        if self.sharded_form is not None or is_by_name(request.checkpoint.names):
            return ShardedStatesLoad(request, prepared, self.built_names)
        return FullStatesLoad(request, prepared.optimizers, self)

    def forget(self) -> None:
        """Drop references to prepared objects, other than those in `context.prepared`, and the loss scale that they led to."""
        self.precision.forget()

    def close(self) -> None:
        """Release what uses the process group, which is about to be destroyed; must not wait for other ranks."""
