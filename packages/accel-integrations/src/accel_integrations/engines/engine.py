"""The interface of a way of training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accel_integrations import gradients
from accel_integrations.averaging import WindowAverage
from accel_integrations.checkpoints.forms import holds_engines
from accel_integrations.compile import compile_model, compile_regions_deepspeed
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
    """One way of training: wraps what was prepared and takes the steps.

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
    divides_losses: ClassVar[bool] = True
    """False where `backward` itself divides a loss by the number of batches in a window."""
    writes_states: ClassVar[bool] = False
    """True where all processes together write models and optimizers into a checkpoint, by `write_states`."""
    options_of_saving: ClassVar[frozenset[str]] = frozenset()
    """Names of arguments that `write_states` takes from `save_state`."""
    options_of_loading: ClassVar[frozenset[str]] = frozenset()
    """Names of arguments that `read_states` takes from `load_state`."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.gradient_state = context.gradient_state
        self.precision: Precision = self.make_precision(context.state.mixed_precision)
        average_over = context.gradient_state.plugin_kwargs.get("average_over", "steps")
        self.averaging = None if average_over == "steps" else WindowAverage(self, average_over)
        """How gradients are averaged over a window; None when each loss is divided by the number of steps."""
        self.library_engine: Any = None
        """What runs backward for this engine, where a library brings an engine of its own."""

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
            wanted, self.context.state.device.type, self.context.handlers, divided=self.shards_gradients
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

    # ---- preparing ----------------------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any], prepare_each: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """Prepare the objects of one `prepare` call, in their order.

        Args:
            objects: What the user gave.
            prepare_each: Prepares every object on its own; engines that pair models with optimizers do their part
                before and after calling it, or instead of it.
        """
        return prepare_each(objects)

    @abstractmethod
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Place the model and wrap it for this way of training; `evaluation` models get no gradient machinery."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """Wrap an optimizer."""
        wrapped = AcceleratedOptimizer(optimizer, device_placement=device_placement, scaler=self.precision.scaler)
        wrapped.step_through(self.step, self.averaging.finish_window if self.averaging is not None else None)
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
        """The last touch on a prepared data loader (XLA's device loader, sequence-parallel adapters)."""
        return loader

    def share_sequences(self, loader: Any) -> Any:
        """A prepared loader as the engine's own sequence parallelism needs it; the same one without."""
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
        """Bring the gradients of plain torch optimizers back to their true size, before clipping or reading them."""
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
        return weight

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

    def write_states(self, folder: Path, **options: Any) -> list[str]:
        """Write the states of all prepared models and optimizers into a checkpoint, on all processes.

        Called where `writes_states` is set.

        Args:
            folder: Where to write.
            options: Those of `options_of_saving` that the user gave.

        Returns:
            Relative names of the files that this process wrote.
        """
        raise NotImplementedError(f"The {self.name!r} engine leaves it to its caller to write states.")

    def check_states(self, names: Collection[str], folder: Path) -> None:
        """Refuse a checkpoint whose states this engine cannot read.

        Args:
            names: Its files.
            folder: Where it is.

        Raises:
            ValueError: Saying how it can be loaded.
        """
        if holds_engines(names):
            raise ValueError(
                f"The checkpoint {folder} was saved under DeepSpeed: load it with a DeepSpeedPlugin, or make plain "
                "weights of it with the zero_to_fp32.py in it."
            )

    def read_states(self, folder: Path, models: Sequence[nn.Module], *, strict: bool = True, **options: Any) -> Any:
        """Read what prepared models and all prepared optimizers need of a checkpoint, without changing them.

        Args:
            folder: The checkpoint.
            models: Those of the prepared models that are to be loaded.
            strict: Whether the names of their weights must be the same on both sides.
            options: Those of `options_of_loading` that the user gave.

        Returns:
            An object whose `apply()`, called on all processes, gives them their states.

        Raises:
            ValueError: There is no such state, it is damaged, or it does not fit.
        """
        from accel_integrations.checkpoints.load_states import read_states

        prepared = self.context.prepared
        return read_states(folder, models, prepared.optimizers, owners=prepared.wrapped, strict=strict)

    def forget(self) -> None:
        """Let go of what was prepared, beyond what the record of prepared objects holds."""

    def close(self) -> None:
        """Finish what needs the process group, which is about to end; must not wait for other processes."""
