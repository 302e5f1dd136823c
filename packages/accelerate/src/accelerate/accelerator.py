"""`Accelerator`: the object through which a training loop runs anywhere. Each method delegates in a line or two."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, cast, overload

import torch

import accel_tracking
from accel_bigmodel.replaceable import register_lookup
from accel_integrations.engines import changed_precision
from accel_integrations.engines.engine import EngineContext
from accel_integrations.engines.registry import EngineMaker, engine_of, make_engine
from accel_integrations.prepared.optimizer import is_lomo_optimizer
from accel_integrations.prepared.prepared import Prepared
from accel_integrations.unwrap import extract_model_from_parallel
from accel_ops import collectives
from accel_ops.memory import release_memory
from accel_state.accelerator_state import AcceleratorState
from accel_state.enums import DistributedType, DynamoBackend, FP8BackendType, PrecisionType, RNGType
from accel_state.gradient_state import GradientState
from accel_state.guessing import guess_arguments
from accel_state.mesh_axes import MESH_AXES, DataShard
from accel_state.weak import Weak
from accelerate.arguments import (
    NOT_GIVEN,
    NotGiven,
    check_num_steps,
    resolve_accumulation,
    resolve_dynamo,
    resolve_handlers,
    resolve_loader_settings,
    resolve_plugins,
    resolve_project,
    resolve_rng_types,
)
from accelerate.compat.deprecated import accept_old_names
from accelerate.compat.legacy import legacy_getattr
from accelerate.compat.seams import OWN, is_overridden, late_bound, remember_own, replacement, warn_of_uncalled
from accelerate.delegated import delegated
from accelerate.device_maps import check_not_dispatched, check_quantized, is_dispatched
from accelerate.first_step_checks import accumulation_before, warn_of_other_accumulation, warn_of_unchanged
from accelerate.preparing import (
    Preparer,
    check_placement,
    in_order,
    method_for,
)
from accelerate.stepping import Accumulation, StepController

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_integrations.prepared.scheduler import AcceleratedScheduler
    from accel_state.mesh import ParallelismConfig
    from accel_state.settings.accumulation import GradientAccumulationPlugin
    from accel_state.settings.compile import TorchDynamoPlugin
    from accel_state.settings.data import DataLoaderConfiguration
    from accel_state.settings.ddp import DistributedDataParallelKwargs
    from accel_state.settings.handlers import AutocastKwargs, Handlers, KwargsHandler
    from accel_state.settings.profile import ProfileKwargs
    from accel_state.settings.project import ProjectConfiguration
    from accel_tracking.tracker import GeneralTracker
    from accel_tracking.tracker_set import TrackerSet
    from accelerate.checkpoint.background import BackgroundSave
    from accelerate.checkpoint.keeper import CheckpointKeeper

_split_batches = NOT_GIVEN  # other libraries pass it on as "not given"
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound=torch.nn.Module)
Loader = TypeVar("Loader")
F = TypeVar("F", bound=Callable[..., Any])
__getattr__ = legacy_getattr(__name__)  # what programs import from here
register_lookup("convert_model_to_fp8_ao", lambda: late_bound(__name__, "convert_model_to_fp8_ao"))


@accept_old_names
@guess_arguments
@remember_own
class Accelerator:
    """Runs one training loop on any hardware, with any number of processes, in any precision.

    Args:
        device_placement (`bool`): Whether `prepare` moves models to the device and data loaders move batches there.
        split_batches (`bool`): Has no effect, as in 1.15: use `DataLoaderConfiguration(split_batches=...)`.
        mixed_precision (`"no"`, `"fp16"`, `"bf16"` or `"fp8"`, *optional*): The dtype of the forward pass under autocast.
            When None, `ACCELERATE_MIXED_PRECISION`, which `accelerate launch` sets, or else full precision.
        gradient_accumulation_steps (`int`): Micro-batches per optimizer step. The environment variable
            `ACCELERATE_GRADIENT_ACCUMULATION_STEPS` takes precedence.
        cpu (`bool`): Compute on the CPU even where there is an accelerator.
        dataloader_config (`DataLoaderConfiguration`, *optional*): How data loaders shard their data over the ranks.
        deepspeed_plugin (`DeepSpeedPlugin`, *optional*): Train with DeepSpeed.
        fsdp_plugin (`FullyShardedDataParallelPlugin`, *optional*): Train with fully sharded data parallelism (FSDP).
        torch_tp_plugin (`TorchTensorParallelPlugin`, *optional*): Deprecated, use `parallelism_config`.
        megatron_lm_plugin (`MegatronLMPlugin`, *optional*): Train with Megatron-LM.
        rng_types (list of `str` or `RNGType`, *optional*): Random generators that prepared data loaders synchronise at
            the start of each iteration: "torch", "cuda", "xpu", "npu", "xla", ..., "generator" (the sampler's; the
            default).
        log_with (tracker, `str`, `LoggerType` or list of these, *optional*): The trackers that `log` writes to.
        project_dir (`str` or path, *optional*): Folder for checkpoints and logs.
        project_config (`ProjectConfiguration`, *optional*): The same, with naming and limits of checkpoints.
        gradient_accumulation_plugin (`GradientAccumulationPlugin`, *optional*): How gradients accumulate, in detail.
        step_scheduler_with_optimizer (`bool`): Whether schedulers step only when optimizers do, and once for each
            process's batch; False when the loop steps them at other times.
        kwargs_handlers (list of `KwargsHandler`, *optional*): Arguments for objects that the accelerator builds, at most
            one of each: `AutocastKwargs`, `DistributedDataParallelKwargs`, `FiniteGradientsKwargs`, `GradScalerKwargs`,
            `InitProcessGroupKwargs`, `ProfileKwargs`, an fp8 recipe.
        dynamo_backend (`str` or `DynamoBackend`, *optional*): Compile models with this backend of `torch.compile`.
        dynamo_plugin (`TorchDynamoPlugin`, *optional*): The same, in detail.
        deepspeed_plugins (`DeepSpeedPlugin` or `dict` of them, *optional*): Several DeepSpeed configurations, by name.
        parallelism_config (`ParallelismConfig`, *optional*): The sizes of the device mesh: data, tensor, context, sequence
            and pipeline parallelism.
        engine (`str` or class, *optional*): A training engine other than the one that the hardware and plugins choose: a name among
            the `accelerate.engines` entry points of installed packages, or a class derived from `Engine`.

    Attributes:
        state (`AcceleratorState`): Processes, devices, precision and plugins of the run.
        gradient_state (`GradientState`): The position in the gradient accumulation window and in the data loader.

    Raises:
        TypeError: For an argument of the wrong class.
        ValueError: For values that are not allowed or contradict one another, and for a second accelerator whose
            settings differ from those of the first.

    Example:
        ```python
        accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        ```
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | NotGiven = _split_batches,
        mixed_precision: PrecisionType | Literal["no", "fp16", "bf16", "fp8"] | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        engine: str | EngineMaker | None = None,
    ) -> None:
        # Settings
        self.project_configuration = resolve_project(project_dir, project_config)
        loader_settings = resolve_loader_settings(dataloader_config, split_batches)
        chosen_rng_types = resolve_rng_types(rng_types)
        accumulation = resolve_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        compilation = resolve_dynamo(dynamo_backend, dynamo_plugin)
        handlers = resolve_handlers(kwargs_handlers)
        plugins = resolve_plugins(
            {
                "deepspeed_plugin": deepspeed_plugin if deepspeed_plugins is None else deepspeed_plugins,
                "fsdp_plugin": fsdp_plugin,
                "torch_tp_plugin": torch_tp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "parallelism_config": parallelism_config,
            }
        )
        self.log_with = [] if log_with is None else accel_tracking.filter_trackers(log_with, self.logging_dir)

        accumulated_before = accumulation_before()

        # Processes and training engine
        with _forget_state_on_error():
            self.state = AcceleratorState(
                mixed_precision=mixed_precision,
                cpu=cpu,
                dynamo_plugin=compilation,
                _from_accelerator=True,
                _emulates_fp8=getattr(handlers.fp8, "is_emulated", False),
                **plugins,
                **(handlers.process_group.to_kwargs() if handlers.process_group else {}),
            )
            self.gradient_state = GradientState(gradient_accumulation_plugin=accumulation)
            self._prepared = Prepared()
            self.engine = make_engine(
                EngineContext(
                    state=self.state,
                    gradient_state=self.gradient_state,
                    handlers=handlers,
                    record=Weak(self._prepared),
                    device_placement=device_placement,
                    step_scheduler_with_optimizer=step_scheduler_with_optimizer,
                    split_batches=loader_settings.split_batches,
                    already_sharded=loader_settings.already_sharded,
                ),
                engine,
            )
            finite_gradients = None
            if handlers.finite_gradients is not None:
                from accelerate.finite_gradients import FiniteGradients

                finite_gradients = FiniteGradients(handlers.finite_gradients, self.engine)

        if self.parallelism_config is not None:
            self.parallelism_config._validate_accelerator(self)

        # Controllers
        self._stepping = StepController(self.engine, self.gradient_state, self._prepared)
        self._preparer = Preparer(
            self.engine,
            self.state,
            self._prepared,
            loader_settings=loader_settings,
            rng_types=chosen_rng_types,
            device_placement=device_placement,
        )
        self._stepping.finite_gradients = self._preparer.finite_gradients = finite_gradients
        if self.project_configuration.save_on_signals:
            from accel_integrations.training_state.window import is_kept
            from accelerate.preemption import SignalSaver

            saver = SignalSaver(
                self.project_configuration,
                self.save_state,
                self.state,
                self.gradient_state,
                lambda: is_kept(self.engine, self._models),
            )
            self._preparer.after_batch = saver.after_batch
        self._keep_what_others_read(handlers)
        warn_of_other_accumulation(self, accumulated_before)
        if self.state.use_distributed:
            from accel_ops.collectives.participants import participants

            participants()  # from here on, no rank waits for this one in a save once it has left the process group

    def _keep_what_others_read(self, handlers: Handlers) -> None:
        """Attributes that libraries built on this one read; all listed in one test."""
        self._handlers, prepared = handlers, self._prepared
        self._models = prepared.models  # transformers asks whether anything was prepared
        self._optimizers = prepared.optimizers
        self._schedulers = prepared.schedulers
        self._dataloaders = prepared.dataloaders
        self.scaler_handler = handlers.grad_scaler
        self.init_handler = handlers.process_group
        self.profile_handler = handlers.profile
        self.fp8_recipe_handler = handlers.fp8
        self.has_fp8_handler = handlers.fp8 is not None
        recipe = type(handlers.fp8).__name__
        self.te_recipe_handler = handlers.fp8 if recipe == "TERecipeKwargs" else None
        self.ao_recipe_handler = handlers.fp8 if recipe == "AORecipeKwargs" else None
        self.msamp_recipe_handler = handlers.fp8 if recipe == "MSAMPRecipeKwargs" else None
        self.fp8_enabled = self.mixed_precision == "fp8"
        self.delayed_fp8_autocast = False  # True where fp8 begins only after sharding
        self.mpu: Any = None  # the process groups of an engine with its own model parallelism

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # copies of objects that hold the accelerator refer to the same run

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The arguments of `DistributedDataParallel`; trainers of other libraries set it before they prepare a model."""
        return self._handlers.ddp

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        self._handlers.ddp = handler

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The arguments of `torch.autocast`, for models prepared from now on and in `autocast` blocks."""
        return self._handlers.autocast

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._handlers.autocast = handler

    # ---- the run and this process -------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of hardware and engine over which the run is distributed."""
        return self.state.distributed_type

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether replicas train on several accelerators of one kind, CPUs excluded."""
        kind = self.distributed_type.name
        return self.use_distributed and kind.startswith("MULTI_") and kind != "MULTI_CPU"

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return self.state.local_process_index

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the main process of its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self.state.is_last_process

    @property
    def mixed_precision(self) -> str:
        """The mixed precision of the run: "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in 8-bit floats; `FP8BackendType.NO` without fp8."""
        from accel_integrations.precision.float8 import float8_backend

        recipe = self.fp8_recipe_handler
        return FP8BackendType(float8_backend(recipe)) if self.fp8_enabled else FP8BackendType.NO

    # ---- settings -----------------------------------------------------------------------------------------------

    device_placement: bool = delegated("_preparer.device_placement", "Whether `prepare` moves models and batches.")
    rng_types: Sequence[Any] = delegated("_preparer.rng_types", "Random generators that data loaders synchronise.")
    step_scheduler_with_optimizer: bool = delegated(
        "engine.context.step_scheduler_with_optimizer", "Whether schedulers step when their optimizers do."
    )

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How data loaders shard their data over the ranks. It may be replaced, for loaders prepared afterwards."""
        return self._preparer.loader_settings

    @dataloader_config.setter
    def dataloader_config(self, settings: DataLoaderConfiguration) -> None:
        self._preparer.loader_settings = settings
        self.engine.context.split_batches = settings.split_batches
        self.engine.context.already_sharded = settings.already_sharded

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split between the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads batches and scatters them; None means for iterable datasets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samplers pad so that every rank gets the same number of batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the shuffling order depends on seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether the host goes on before a batch is copied to the device, also where it is not in pinned memory."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether data loaders store their position themselves."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder for the files of trackers."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin; None with other engines."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The configuration of DeepSpeed; `prepare` fills its "auto" values."""
        plugin = self.state.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The wrapper that runs the backward pass of DeepSpeed's engine; None before a model is prepared."""
        return getattr(self.engine, "library_engine", None)

    @deepspeed_engine_wrapped.setter
    def deepspeed_engine_wrapped(self, wrapped: Any) -> None:
        self.engine.library_engine = wrapped  # type: ignore[attr-defined]

    # ---- the device mesh ----------------------------------------------------------------------------------------

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the device mesh; None for data parallelism alone."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh; None without a parallelism configuration."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether the engine is version 2 of FSDP."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether several kinds of parallelism can be combined."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes (its shard of) the model when a model is saved."""
        config, mesh = self.parallelism_config, self.torch_device_mesh
        if config is None or mesh is None:
            return self.is_main_process
        replicated = [axis for axis in ("dp_replicate", "cp") if axis in config.active_mesh_dims]
        return all(mesh.get_local_rank(axis) == 0 for axis in replicated)

    @property
    def data_parallel_rank(self) -> int:
        """This process's rank in the mesh dimension `dp_replicate`: which replica of the model it belongs to."""
        return self._axis_rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's rank in the mesh dimension `dp_shard`: which shard of a replica's parameters it holds."""
        return self._axis_rank("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's rank in the tensor parallel (TP) group."""
        return self._axis_rank("tp")

    @property
    def context_parallel_rank(self) -> int:
        """This process's rank in the context parallel (CP) group."""
        return self._axis_rank("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's pipeline stage."""
        return self._axis_rank("pp")

    def _axis_rank(self, axis: str) -> int:
        config, mesh = self.parallelism_config, self.torch_device_mesh
        if config is None or mesh is None or axis not in config.active_mesh_dims:
            raise RuntimeError(
                f"The device mesh of this run has no {axis!r} dimension, so that there is no rank in it. Pass "
                f"parallelism_config=ParallelismConfig({axis}_size=...) with a size above 1 to Accelerator."
            )
        return mesh.get_local_rank(axis)

    def print_parallelism(self) -> None:
        """Print the device mesh, the groups of each dimension, and what each rank holds. Call it on all processes.

        Prepare models and optimizers before. Optimizers have a state once they have stepped.
        """
        from accel_integrations.parallel.picture import draw_mesh, holding_of

        config = self.parallelism_config
        sizes = {"dp_replicate": self.num_processes}
        if config is not None and config.total_size > 1:
            sizes = {axis: getattr(config, f"{axis}_size") for axis in MESH_AXES}
        mine = holding_of(self._models, [optimizer.optimizer for optimizer in self._optimizers])
        self.print(draw_mesh(sizes, collectives.gather_object([mine])))

    # ---- doing things on some processes -------------------------------------------------------------------------

    @overload
    def on_main_process(self, function: F) -> F: ...

    @overload
    def on_main_process(self, function: None = None) -> Callable[[F], F]: ...

    def on_main_process(self, function: Any = None) -> Any:
        """Decorator: only the main process runs the function, the others get None."""
        return self.state.on_main_process(function)

    @overload
    def on_local_main_process(self, function: F) -> F: ...

    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[F], F]: ...

    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorator: only the main process of each machine runs the function, the others get None."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: F) -> F:
        """Decorator: only the process of the highest rank runs the function, the others get None."""
        return self.state.on_last_process(function)

    @overload
    def on_process(self, function: F, process_index: int | None = None) -> F: ...

    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> Callable[[F], F]: ...

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorator: only the process of rank `process_index` runs the function, the others get None."""
        return self.state.on_process(function, process_index=process_index)

    @overload
    def on_local_process(self, function: F, local_process_index: int | None = None) -> F: ...

    @overload
    def on_local_process(self, function: None = None, local_process_index: int | None = None) -> Callable[[F], F]: ...

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorator: only process `local_process_index` of each machine runs the function, the others get None."""
        return self.state.on_local_process(function, local_process_index=local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """A block that the main process runs before all others enter it."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """A block that the main process of each machine runs before the others enter it."""
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> AbstractContextManager[T]:
        """A block with this rank's split of the inputs; see `PartialState.split_between_processes`.

        Args:
            inputs (`list`, `tuple`, `torch.Tensor`, `datasets.Dataset` or `dict` of these): What to split, along the
                first dimension.
            apply_padding (`bool`): Pad shorter splits with the last input, so that all have the same length.
        """
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    def wait_for_everyone(self) -> None:
        """Wait until all processes have reached this call (a barrier)."""
        if self.state.use_distributed:
            from accel_ops.collectives.participants import participants

            if (notes := participants()) is not None:
                notes.note_wait()  # so that no rank waits for this one in another call
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine, with the arguments of `print`."""
        self.state.print(*args, **kwargs)

    # ---- preparing ----------------------------------------------------------------------------------------------

    @overload
    def prepare(self, item: T, /, *, device_placement: Sequence[bool | None] | None = None) -> T: ...

    @overload
    def prepare(self, *args: *Ts, device_placement: Sequence[bool | None] | None = None) -> tuple[*Ts]: ...

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:  # type: ignore[misc]
        """Make models, optimizers, schedulers and data loaders ready to train here.

        Args:
            args: Any number of them, in any order. Other objects, and objects that are prepared already, are returned
                unchanged.
            device_placement (list of `bool`, *optional*): For each object, whether it is moved to the device; None for
                the accelerator's own setting.

        Returns:
            The prepared objects in the same order; a single one not in a tuple.

        Raises:
            ValueError: For a `device_placement` of another length, or a model that `device_map` spread over several
                devices when there are several processes.

        Example:
            ```python
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            ```
        """
        if self.parallelism_config is not None and self.parallelism_config.cp_enabled:
            args = self._prepare_cp(*args)
        if self.is_fsdp2:
            args = self._prepare_fsdp2(*args)
        if self.distributed_type is DistributedType.DEEPSPEED and is_overridden(self, "_prepare_deepspeed"):
            results: Sequence[Any] = self._prepare_deepspeed(*args)
        else:
            results = self._prepare_all(args, device_placement)
        return results[0] if len(results) == 1 else tuple(results)

    def _prepare_all(self, args: Sequence[Any], device_placement: Sequence[bool | None] | None) -> Sequence[Any]:
        placement = check_placement(device_placement, args)
        for model in (item for item in args if isinstance(item, torch.nn.Module)):
            self._check_device_map(model)
        results = self.engine.before_prepare(args)
        for index in in_order(results):
            results[index] = self._prepare_one(results[index], placement[index])
        return self.engine.after_prepare(results)

    def _prepare_one(self, item: Any, device_placement: bool | None) -> Any:
        method = method_for(item)
        if method is None:
            warn_of_unchanged(item)
            return item
        options = {} if method == "prepare_scheduler" else {"device_placement": device_placement}
        return getattr(self, method)(item, **options)

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """What `prepare` does under DeepSpeed. Older trainers call it, other libraries override it."""
        return tuple(self._prepare_all(args, None))

    def _check_device_map(self, model: nn.Module) -> None:
        check_quantized(model, self.device)
        if self.num_processes > 1 and self.verify_device_map(model):
            check_not_dispatched(model, self.num_processes)

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """The objects to prepare under context parallelism, unchanged. Other libraries monkeypatch this method."""
        return args

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """The same under FSDP 2."""
        return args

    def prepare_model(self, model: M, device_placement: bool | None = None, evaluation_mode: bool = False) -> M:
        """Prepare one model, and return the one to call from now on.

        Args:
            model (`torch.nn.Module`): The model.
            device_placement (`bool`, *optional*): Whether to move it to the device.
            evaluation_mode (`bool`): Leave out what only training needs, such as the all-reduce of gradients.
        """
        config = self.parallelism_config
        splits = config is not None and config.pp_enabled  # into stages, of which the engine shards each
        replaced = replacement(__name__, "fsdp2_prepare_model") if self.is_fsdp2 and not splits else None
        if self.is_fsdp2 and replaced is None:
            warn_of_uncalled()
        shard = None if replaced is None else partial(replaced, self)
        wrapper: Any = self._preparer.prepared_model(model)
        if wrapper is not None:
            return wrapper
        self._check_device_map(model)
        prepared: Any = self._preparer.prepare_model(model, device_placement, evaluation_mode, shard)
        self._stepping.first_step.watch_model(prepared)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; it then steps only at sync steps, where a gradient accumulation window ends."""
        prepared = self._preparer.prepare_optimizer(optimizer, device_placement)
        self._stepping.first_step.watch(prepared)
        if is_lomo_optimizer(prepared.optimizer):
            self._stepping.step_in_backward()
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare one learning-rate scheduler. Prepare its optimizer before."""
        return self._preparer.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: Loader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Loader:
        """Prepare one data loader; it then yields this rank's shard of the data.

        Args:
            data_loader (`torch.utils.data.DataLoader`): The loader.
            device_placement (`bool`, *optional*): Whether batches are moved to the device.
            slice_fn_for_dispatch (`Callable`, *optional*): How a batch is sliced when the main process scatters
                batches; called with the batch, the slice and, by keyword, `process_index` and `num_processes`.
        """
        shard, loader = None, cast("DataLoader[Any]", data_loader)
        if is_overridden(self, "num_processes") or is_overridden(self, "process_index"):
            shard = DataShard(self.process_index, self.num_processes)
        return self._preparer.prepare_data_loader(loader, device_placement, slice_fn_for_dispatch, shard)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """The loader with batches sharded along the sequence, for DeepSpeed's sequence parallelism; unchanged without.

        Loaders that are prepared together with the model are sharded already.

        Args:
            dl: A prepared loader.
            model (`torch.nn.Module`): Prepared with DeepSpeed.
        """
        shard_sequences = getattr(self.engine, "shard_sequences", None)  # DeepSpeed's has one
        return dl if shard_sequences is None else shard_sequences(dl)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a `device_map` dispatched the model, or a submodule of it, to several devices."""
        return is_dispatched(model)

    def unwrap_model(self, model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> M:
        """The model inside what `prepare` returned.

        Args:
            model (`torch.nn.Module`): A prepared model; any other one is returned unchanged.
            keep_fp32_wrapper (`bool`): False restores the `forward` from before mixed precision, also in the prepared
                model.
            keep_torch_compile (`bool`): False removes the wrapper of `torch.compile`, too.
        """
        unwrapped: Any = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return unwrapped

    def skip_first_batches(self, dataloader: Loader, num_batches: int = 0) -> Loader:
        """A loader that skips the first `num_batches` batches, to resume in the middle of an epoch."""
        from accel_data.skipping import skip_first_batches

        return skip_first_batches(dataloader, num_batches=num_batches)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop all references to prepared objects and free memory: `model, loader = accelerator.free_memory(model, loader)`.

        What is prepared next trains as the first did: the loss scale and "auto" values of a DeepSpeed configuration begin anew, and
        objects registered for checkpoints are kept only as long as the program refers to them.

        Returns as many None as there are objects, for the caller to overwrite its own references with.
        """
        self._prepared.clear()
        self._stepping.forget()
        self.engine.forget()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    # ---- gradient accumulation ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Micro-batches counted by `accumulate` since the last end of a data loader."""
        return self._stepping.step

    @step.setter
    def step(self, step: int) -> None:
        self._stepping.step = step

    @property
    def sync_gradients(self) -> bool:
        """Whether this is a sync step: gradients are all-reduced and optimizers step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        steps = check_num_steps("gradient_accumulation_steps", gradient_accumulation_steps)
        self.gradient_state.plugin_kwargs["num_steps"] = steps

    def accumulate(self, *models: nn.Module) -> Accumulation:
        """A block for one micro-batch of gradient accumulation.

        Gradients are synchronized, and optimizers and schedulers step, only at sync steps: in the last micro-batch of an
        accumulation window. The end of a prepared loader ends the window, too.

        Args:
            models (`torch.nn.Module`): The prepared models trained in the block, or lists of them.

        Raises:
            TypeError: For an object that is not a module.
            RuntimeError: When nothing was prepared.

        Example:
            ```python
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        overridden = type(self).no_sync is not OWN["no_sync"]  # `is_overridden`, without a call in every step
        return Accumulation(self._stepping, models, self.no_sync if overridden else None)

    def _do_sync(self) -> None:
        """Begin a micro-batch, and set `sync_gradients`; libraries with an `accumulate` of their own call this."""
        self._stepping.begin_batch()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A block in which the backward pass of this model does not all-reduce its gradients."""
        return self.engine.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """A block in which the backward pass all-reduces gradients although the forward pass ran under `no_sync`.

        Example:
            ```python
            with accelerator.no_sync(model):
                losses = [loss_function(model(inputs), targets) for inputs, targets in window]
            for loss in losses[:-1]:
                accelerator.backward(loss)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(losses[-1])
            ```
        """
        engine = engine_of(model)
        if engine is not None:
            return engine.sync_next_backward(model)
        from accel_integrations.engines.ddp import sync_next_backward

        return sync_next_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """A block in which ranks may have different numbers of batches.

        Args:
            joinables (list): The prepared models (and other `torch.distributed.algorithms.Joinable`) trained in it.
            even_batches (`bool`, *optional*): Overrides, within the block, whether the prepared loaders pad.

        Example:
            ```python
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for inputs, targets in loader:
                    ...
            ```
        """
        if self._stepping.finite_gradients is not None:
            raise ValueError(
                "join_uneven_inputs() cannot be combined with FiniteGradientsKwargs: ranks without batches do not step, and so do not "
                "learn of gradients. Leave one of them out."
            )
        return self.engine.join(joinables, even_batches=even_batches)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Run the backward pass of a loss and accumulate its gradients; use it instead of `loss.backward()`.

        The loss is divided by `gradient_accumulation_steps`, unless the plugin's `average_over` says otherwise.

        Args:
            loss (`torch.Tensor`): 0-dim.
            weight (`float` or 0-dim `torch.Tensor`, *optional*): The number of items, for instance tokens, of which
                the loss is the mean. Required with `GradientAccumulationPlugin(average_over="weights")`, and only allowed there.
            kwargs: For `torch.Tensor.backward`.
        """
        self._stepping.backward(loss, weight, kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Update parameters within the backward pass, with prepared `Lomo` and `AdaLomo` optimizers."""
        self._stepping.lomo_backward(loss, learning_rate)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a `Lomo` or `AdaLomo` optimizer was prepared."""
        return self._stepping.has_lomo_optimizer

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16, or None. Assignable; used from the next backward pass."""
        return self.engine.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        changed_precision.scale_by(self.engine, scaler)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients at a sync step, before reading or changing them.

        Until then they are scaled by the loss scale (fp16), or not yet averaged over the accumulation window.

        Args:
            optimizer (prepared optimizer or list of them, *optional*): Whose gradients; by default those of all
                prepared optimizers.
        """
        self._stepping.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float | str = 2
    ) -> torch.Tensor | None:
        """Gradient clipping: scale gradients so that their total norm is at most `max_norm`.

        Args:
            parameters (`torch.Tensor` or iterable of them): Whose gradients.
            max_norm (`float`): The largest total norm.
            norm_type (`float`): The p of the p-norm; "inf" for the largest absolute value.

        Returns:
            The total norm before clipping, 0-dim, over the full gradients where they are sharded.
        """
        return self._stepping.clip_grad_norm_(parameters, max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp every element of the gradients to `[-clip_value, clip_value]`."""
        self._stepping.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because gradients were inf or NaN."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def native_amp(self) -> bool:
        """Whether `torch.autocast` is used. It may be assigned, for models that are prepared later, and for `autocast`."""
        return self.engine.precision.name != "no"

    @native_amp.setter
    def native_amp(self, enabled: bool) -> None:
        if enabled != self.native_amp:
            changed_precision.autocast(self.engine, enabled)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """A block that runs in mixed precision, for operations outside of a prepared model's forward pass.

        Args:
            autocast_handler (`AutocastKwargs`, *optional*): Overrides the accelerator's own.
        """
        with self.engine.precision.autocast(autocast_handler):
            yield

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """A block in which every rank has its shard of sequences; it does nothing unless a mesh dimension shards them.

        That is context parallelism (`cp_size`), and sequence parallelism without DeepSpeed (`sp_size`), whose prepared
        loaders yield shards already: those stay as they are. Run the forward and the backward pass in it. Labels are sharded as
        they are, so shift them before.

        Args:
            buffers (list of `torch.Tensor`, *optional*): The tensors to shard along the sequence, in place.
            buffer_seq_dims (list of `int`, *optional*): For each, which dimension is the sequence.
            no_restore_buffers (set of `torch.Tensor`, *optional*): Those that need not be full tensors again afterwards.

        Raises:
            ValueError: For buffers that cannot be sharded evenly.

        Example:
            ```py
            buffers = [batch["input_ids"], batch["shift_labels"], batch["position_ids"]]
            with accelerator.maybe_context_parallel(buffers, [1, 1, 1], no_restore_buffers=set(buffers)):
                loss = model(**batch).loss
                accelerator.backward(loss)
            ```
        """
        with ExitStack() as stack:
            for transform in self._preparer.transforms:
                stack.enter_context(transform.sharded(buffers, buffer_seq_dims, no_restore_buffers))
            yield

    def mean_over_tokens(self, loss: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
        """The mean loss over the tokens of all ranks, however many each of them has.

        Where sequences are sharded, the shards have different numbers of tokens that count, and the mean of the
        ranks' means is not the mean over all tokens. Call `backward` on the result.

        Args:
            loss (`torch.Tensor`): 0-dim, the mean over this process's tokens.
            num_tokens (0-dim `torch.Tensor` or `int`): How many of them count.

        Returns:
            0-dim, identical on all processes.

        Example:
            ```py
            loss = cross_entropy(model(inputs), targets)  # targets of -100 do not count
            loss = accelerator.mean_over_tokens(loss, (targets != -100).sum())
            accelerator.backward(loss)
            ```
        """
        return self.engine.mean_over_tokens(loss, num_tokens)

    # ---- triggers -----------------------------------------------------------------------------------------------

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """0-dim int tensor, 1 once `set_trigger` was called on this process; None before triggers are used."""
        return self._stepping.flag_tensor

    @flag_tensor.setter
    def flag_tensor(self, flag: torch.Tensor | None) -> None:
        self._stepping.flag_tensor = flag

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` sees on all processes, for instance to stop early."""
        self._stepping.set_trigger()

    def check_trigger(self) -> bool:
        """Whether any process set the flag since the last check. Call it on all processes; it resets the flag."""
        return self._stepping.check_trigger()

    # ---- collectives --------------------------------------------------------------------------------------------

    def gather(self, tensor: T) -> T:
        """All-gather tensors and concatenate them along the first dimension.

        Args:
            tensor (`torch.Tensor` or nested structure of them): First dimensions may differ between processes.

        Returns:
            The same structure on every process; 0-dim tensors become 1-dim, one element per process.
        """
        return collectives.gather(tensor)

    @overload
    def gather_for_metrics(self, input_data: T, use_gather_object: Literal[False] = False) -> T: ...

    @overload
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool) -> Any: ...

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather a batch's results and drop those of samples that only padded the last batch.

        Args:
            input_data: Nested tensors of which the first dimension is the batch; or any objects, returned as a list.
            use_gather_object (`bool`): Gather as objects even if all leaves are tensors.

        Example:
            ```python
            for inputs, targets in loader:
                predictions, targets = accelerator.gather_for_metrics((model(inputs).argmax(-1), targets))
                metric.add(predictions, targets)
            ```
        """
        from accelerate.gathering import gather_for_metrics

        return gather_for_metrics(
            input_data,
            use_gather_object,
            self.gradient_state,
            self.parallelism_config,
            self.engine.readers,
            self.gather if is_overridden(self, "gather") else collectives.gather,
        )

    def reduce(
        self, tensor: T, reduction: Literal["sum", "mean", "none", "max", "min"] = "sum", scale: float = 1.0
    ) -> T:
        """All-reduce tensors: their sum, mean, maximum or minimum over all processes.

        Args:
            tensor (`torch.Tensor` or nested structure of them): Equal shapes on all processes.
            reduction (`"sum"`, `"mean"`, `"max"`, `"min"` or `"none"`): The operation; "none" returns `tensor` itself.
            scale (`float`): A factor for the result; XLA only.

        Returns:
            The same structure on every process.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pad tensors to the largest size that any process has.

        Args:
            tensor (`torch.Tensor` or nested structure of them): They may differ in `dim` only.
            dim (`int`): The dimension.
            pad_index (`int`): The value to pad with.
            pad_first (`bool`): Pad at the beginning.
        """
        return collectives.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    @cached_property
    def _checkpoints(self) -> CheckpointKeeper:
        from accelerate.checkpoint.keeper import CheckpointKeeper

        return CheckpointKeeper(self)

    @property
    def _custom_objects(self) -> list[Any]:
        return self._prepared.registered()  # read by other libraries

    @property
    def _save_model_state_pre_hook(self) -> Mapping[int, Callable[..., None]]:
        return self._checkpoints._save_hooks  # read by other libraries

    @property
    def _load_model_state_pre_hook(self) -> Mapping[int, Callable[..., None]]:
        return self._checkpoints._load_hooks  # read by other libraries

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The full state dict of a model, also where it is sharded, or offloaded to CPU memory or disk.

        All ranks call this. Where the model is sharded, the main process alone gets the values and the others an empty dict; for a
        model of peft, which looks up names on every rank, they get tensors on the meta device.

        Args:
            model (`torch.nn.Module`): A prepared model, or one with offloaded modules (`dispatch_model`).
            unwrap (`bool`): Use the names of the unwrapped model; False keeps the wrappers' prefixes.
        """
        if not unwrap:
            return model.state_dict()
        from accel_bigmodel.offload.collect import get_state_dict_offloaded_model, has_offloaded_weights
        from accel_integrations.prepared.library_views import as_libraries_see_it

        if has_offloaded_weights(model):
            return get_state_dict_offloaded_model(self.unwrap_model(model))
        state_dict = self.engine.full_state_dict(model)
        return state_dict if self.engine.is_replicated else as_libraries_see_it(state_dict, self.unwrap_model(model))

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object once per run, or once per machine with `ProjectConfiguration(save_on_each_node=True)`.

        Args:
            obj: Any object for `torch.save`; a `dict` of tensors with `safe_serialization`.
            f (`str` or path): The file.
            safe_serialization (`bool`): Write safetensors.
        """
        from accel_ops import files

        files.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the full weights of a prepared model into a model folder, in several files if they are large.

        Args:
            model (`torch.nn.Module`): The model.
            save_directory (`str` or path): The folder; created if it does not exist.
            max_shard_size (`int` of bytes or `str`): The largest size of one file, for instance "5GB".
            safe_serialization (`bool`): Write safetensors; False for `torch.save`.
        """
        from accelerate.model_folder import save_model

        save_model(self, model, save_directory, max_shard_size, safe_serialization)

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: Literal[False] = False,
        **save_model_func_kwargs: Any,
    ) -> Path: ...

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool,
        **save_model_func_kwargs: Any,
    ) -> Path | BackgroundSave: ...

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path | BackgroundSave:
        """Write a checkpoint to resume training from, and return its folder. It appears complete or not at all.

        Args:
            output_dir (`str` or path, *optional*): The folder; chosen by
                `ProjectConfiguration(automatic_checkpoint_naming=True)` when left out.
            safe_serialization (`bool`): Write models as safetensors.
            async_save (`bool`): Only copy the states, and write them while training continues. The returned
                `BackgroundSave` can be used as the path of the folder; its `result()` waits until the checkpoint is
                complete. An error is raised there, or else by the next `save_state`, `load_state` or `end_training`.
            save_model_func_kwargs: Further arguments of the function that writes models.
        """
        return self._checkpoints.save_state(
            output_dir, safe_serialization, async_save=async_save, **save_model_func_kwargs
        )

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of `save_state` into the objects that were prepared and registered in the same order.

        Args:
            input_dir (`str` or path, *optional*): The folder; the newest complete checkpoint when left out.
            load_kwargs (`dict`, *optional*): Further arguments of `torch.load`: `map_location` for the tensors of optimizers, `mmap`,
                `encoding`. What would run code from a file, such as `weights_only=False`, raises `ValueError`.
            load_model_func_kwargs: Further arguments of the function that loads models.
        """
        self._checkpoints.load_state(input_dir, load_kwargs, **load_model_func_kwargs)

    def resume(self) -> bool:
        """Load the newest complete checkpoint of the project, if there is one: the same program starts and restarts a run.

        Returns:
            Whether there was one.

        Raises:
            ValueError: The accelerator has no `project_dir`, or none of its checkpoints is complete.

        Example:
            ```python
            continues = DataLoaderConfiguration(use_stateful_dataloader=True)
            accelerator = Accelerator(project_dir="runs/digits", dataloader_config=continues)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.resume()
            for epoch in range(loader.iteration, 3):
                for batch in loader:
                    ...
            ```
        """
        return self._checkpoints.resume()

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Have `hook(models, weights, output_dir)` called before `save_state` writes models.

        The hook may change the lists in place; what it removes from `weights` is not written. Returns a handle, whose
        `remove()` takes the hook away.
        """
        return self._checkpoints.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Have `hook(models, input_dir)` called before `load_state` reads models.

        The hook may change the list in place; models it removes are not read. Returns a handle, whose `remove()` takes
        the hook away.
        """
        return self._checkpoints.register_load_state_pre_hook(hook)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects of your own in `save_state` and `load_state`.

        Args:
            objects: With `state_dict()` and `load_state_dict(state)`, in the same order when saving and loading.

        Raises:
            ValueError: Some lack these methods; then none is registered.
        """
        methods = ("state_dict", "load_state_dict")
        wrong = [
            f"Item at index {index}, {shorten(item)} ({type(item).__name__})"
            for index, item in enumerate(objects)
            if not all(callable(getattr(item, name, None)) for name in methods)
        ]
        if wrong:
            raise ValueError(
                f"register_for_checkpointing() got objects that it cannot save: {'; '.join(wrong)}. An object needs the methods "
                "state_dict() and load_state_dict(state)."
            )
        self._custom_objects.extend(objects)

    # ---- tracking -----------------------------------------------------------------------------------------------

    @cached_property
    def _tracker_set(self) -> TrackerSet:
        return accel_tracking.TrackerSet(self.log_with, self.logging_dir)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The started trackers; empty on processes other than the main one. `log` writes to those assigned here, too."""
        return self._tracker_set.active

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self._tracker_set.active = trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`, on the main process.

        A tracker whose service cannot be reached is disabled with a warning.

        Args:
            project_name (`str`): Name of the run.
            config (`dict`, *optional*): The hyperparameters of the run, stored with it.
            init_kwargs (`dict`, *optional*): Per tracker name, further arguments of its constructor.

        Raises:
            TypeError: `project_name` is not a `str` although one of our trackers needs it, or `init_kwargs` is not a
                `dict` of `dict`.
        """
        self._tracker_set.start(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A started tracker by its `name`, or with `unwrap` the run object of its library.

        On processes other than the main process it is a tracker that ignores every call.

        Raises:
            ValueError: When no tracker of this name was started.
        """
        return self._tracker_set.get(name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to all started trackers. A tracker that fails warns once, and training continues.

        Args:
            values (`dict`): Values by name.
            step (`int`, *optional*): The training step they belong to.
            log_kwargs (`dict`, *optional*): Per tracker name, further arguments of its `log`.

        Raises:
            TypeError: `values` is not a `dict`, or `step` not an `int`, although one of our trackers was started.
        """
        self._tracker_set.log(values, step, log_kwargs)

    def end_training(self) -> None:
        """Finish trackers and checkpoints, and destroy the process group. Call it last, on all processes."""
        try:
            try:
                self._tracker_set.finish()
            finally:
                if "_checkpoints" in vars(self):
                    self._checkpoints.finish()
        finally:
            self.engine.close()
            self.state.destroy_process_group()

    def profile(
        self, profile_handler: ProfileKwargs | None = None, summary: bool = True
    ) -> AbstractContextManager[torch.profiler.profile]:
        """A block under `torch.profiler`; with `output_trace_dir`, each process writes a Chrome trace there.

        Args:
            profile_handler (`ProfileKwargs`, *optional*): Overrides the accelerator's own.
            summary (`bool`): Whether the main process prints a summary of the times to standard error.
        """
        return accel_tracking.record_profile(profile_handler or self.profile_handler, summary)


@contextmanager
def _forget_state_on_error() -> Iterator[None]:
    """Reset the shared state when the set-up fails, so that the next accelerator may have other settings."""
    is_first = not AcceleratorState._shared_state
    try:
        yield
    except BaseException:
        if is_first:
            AcceleratorState._reset_state()
        raise
