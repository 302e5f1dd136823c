"""The DeepSpeed engine: DeepSpeed owns gradients, optimizer steps and states; this class calls it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.averaging import StepAverage
from accel_integrations.deepspeed_dummies import DummyOptim, DummyScheduler
from accel_integrations.engines.deepspeed.config import MICRO_BATCH, fill_auto_values
from accel_integrations.engines.deepspeed.named_states import NamedStatesLoad
from accel_integrations.engines.deepspeed.prepare_arguments import (
    OF_DEEPSPEED,
    RULES,
    check_fit,
    check_model_and_optimizer,
    map_pytorch_optim_to_deepspeed,
)
from accel_integrations.engines.deepspeed.sequence import UlyssesAttention, UlyssesBatches, uses_ulysses
from accel_integrations.engines.deepspeed.startup import (
    device_as_local_rank,
    get_active_deepspeed_plugin,
    join_processes,
    leave_processes,
    load_library,
)
from accel_integrations.engines.deepspeed.states import EnginesLoad, EnginesSave, loads_as_saved
from accel_integrations.engines.deepspeed.wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from accel_integrations.engines.engine import Engine, EngineContext
from accel_integrations.engines.prepare_arguments import PrepareArguments
from accel_integrations.engines.sharded_engines import warn_no_join
from accel_integrations.parallel.module_states import all_reduce_over_group
from accel_integrations.parallel.replicas import mean_over_tokens
from accel_integrations.prepared.parameters import plain_name
from accel_integrations.prepared.prepared import Notes, keep
from accel_integrations.prepared.whole_parameters import check_sharded_parameters
from accel_integrations.training_state.formats.sharded import check_shared_folder
from accel_integrations.training_state.interface import LoadRequest, PendingLoad, PendingSave
from accel_ops.modules import has_compiled_regions, is_compiled_module
from accel_state.enums import DynamoBackend
from accel_state.mesh_axes import DataShard
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.precision.precision import Precision
    from accel_state.settings.deepspeed import DeepSpeedPlugin

NOT_OFFLOADED = (None, "none")
WATCHED_STEPS = 100  # reading the norm makes the host wait for the device, so that not all steps are watched


@final
class DeepSpeedEngine(Engine):
    """`deepspeed.initialize`: what is prepared together becomes one engine of DeepSpeed, which steps in backward."""

    name = "deepspeed"
    accepts_transforms = False
    steps_torch_optimizers = False
    unguarded_because = "DeepSpeed takes the steps, and leaves out those whose gradients overflow by itself"
    compiles_in_place = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.library_engine: Any = None
        """The engine of DeepSpeed that `backward` uses: the first one with an optimizer."""
        self._arguments = PrepareArguments()
        self._objects: tuple[Any, Any, Any] | None = None
        self._attention: UlyssesAttention | None = None
        self._names: Notes[Any, list[list[str]]] = Notes()
        self._configured: dict[str, Any] | None = None  # the configuration before its "auto" values were filled
        self._warned_of_clipping = False
        self._num_watched_steps = 0  # the next ones that may warn of unasked clipping

    # ---- before anything starts ---------------------------------------------------------------------------------

    @override
    def check(self) -> None:
        """Check the settings, then initialize DeepSpeed on the process group.

        Raises:
            ValueError: For float16 on the CPU, `average_over`, and mesh dimensions that DeepSpeed does not have.
        """
        state = self.context.state
        if state.device.type == "cpu" and state.mixed_precision == "fp16":
            raise ValueError(
                "mixed_precision='fp16' is not supported with DeepSpeed on the CPU. Choose 'bf16' or 'no'."
            )
        if self.averaging.is_by_window:
            raise ValueError(
                "GradientAccumulationPlugin(average_over=...) needs gradients at the end of an accumulation window, "
                "but DeepSpeed takes the optimizer step in backward. Leave it out."
            )
        self._check_axes()
        load_library(state.device)
        join_processes(state.device, state.backend)  # models may be built sharded before `prepare`

    def _check_axes(self) -> None:
        config = self.context.state.parallelism_config
        if config is None:
            return
        unsupported = [f"{axis}_size" for axis in config.active_mesh_dims if axis != "sp"]
        if config.sp_enabled and config.sp_backend != "deepspeed":
            unsupported.append(f"sp_backend={config.sp_backend!r}")
        if unsupported:
            raise ValueError(
                f"ParallelismConfig uses {', '.join(unsupported)}, which cannot be combined with DeepSpeed. DeepSpeed "
                "shards parameters by zero_stage, layers by tensor_parallel in its own configuration, and sequences by "
                "sp_size with sp_backend='deepspeed'. Use these instead."
            )

    @override
    def make_precision(self, wanted: str) -> Precision:
        """Full precision, because DeepSpeed converts the model itself, except for 8-bit floats."""
        asked = self.context.state._mixed_precision
        return super().make_precision("fp8" if asked == "fp8" else "no")

    @override
    def make_step_average(self) -> StepAverage:
        """DeepSpeed divides losses in backward."""
        return StepAverage(self.gradient_state, divides=False)

    @override
    def data_shard(self) -> DataShard:
        """All ranks read different samples, except for those of a TP group."""
        state = self.context.state
        size = int(self.plugin.get_value("tensor_parallel.autotp_size") or 1)
        return DataShard(state.process_index // size, state.num_processes // size)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The settings in use."""
        return get_active_deepspeed_plugin(self.context.state)

    def _sequence_size(self) -> int:
        """Number of ranks that hold shards of one sequence."""
        config = self.context.state.parallelism_config
        return config.sp_size if config is not None and uses_ulysses(config) else 1

    # ---- preparing ----------------------------------------------------------------------------------------------

    @override
    def before_prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Find the model, its optimizer and its scheduler, and fill the "auto" values of the configuration.

        Raises:
            ValueError: For objects that cannot be prepared together, or do not fit the configuration.
        """
        self._objects = None
        self._arguments = arguments = PrepareArguments.find(objects, RULES)
        if arguments.model is None:
            return list(objects)
        model, optimizer, scheduler = arguments.pick(objects)
        config = self.plugin.deepspeed_config
        check_fit(optimizer, scheduler, config)
        check_model_and_optimizer(model, optimizer, config)
        stage = self.plugin.get_value("zero_optimization.stage", 0)
        if stage > 0 and isinstance(optimizer, torch.optim.Optimizer) and not _is_of_deepspeed(optimizer):
            check_sharded_parameters(optimizer, True, f"ZeRO stage {stage}")
        if self.plugin.get_value("gradient_clipping") == "auto":
            self._num_watched_steps = WATCHED_STEPS
        readers = self.data_shard().count
        if self._configured is None:
            self._configured = copy.deepcopy(config)
        fill_auto_values(
            self.plugin, self.context, objects, model, optimizer, scheduler, readers, readers // self._sequence_size()
        )
        self._objects = (model, optimizer, scheduler)
        return [None if index in arguments.positions else item for index, item in enumerate(objects)]

    @override
    def after_prepare(self, results: list[Any]) -> list[Any]:
        """Build one engine of DeepSpeed from the objects that `before_prepare` found."""
        arguments, objects = self._arguments, self._objects
        self._objects = None
        if objects is None:
            return results
        record = self.context.prepared
        engine, optimizer, scheduler = self._build(*objects)
        record.keep_model(self.unwrap(engine), engine)
        for members, prepared in ((record.optimizers, optimizer), (record.schedulers, scheduler)):
            if prepared is not None:
                keep(members, prepared)
        for index, prepared in zip(
            (arguments.model, arguments.optimizer, arguments.scheduler), (engine, optimizer, scheduler), strict=True
        ):
            if index is not None:
                results[index] = prepared
        return [self.shard_sequences(one) if one in record.dataloaders else one for one in results]

    def _build(self, model: nn.Module, optimizer: Any, scheduler: Any) -> tuple[Any, Any, Any]:
        """Build the engine; returns it with the wrapped optimizer and scheduler."""
        import deepspeed

        plugin, state = self.plugin, self.context.state
        plugin.set_moe_leaf_modules(model)
        model = self.precision.wrap_forward(self.precision.convert(model))
        built = None if optimizer is None else _names_in(optimizer, model)
        arguments: dict[str, Any] = {"model": model, "config_params": plugin.deepspeed_config}
        if (config := state.parallelism_config) is not None and uses_ulysses(config):
            self._restore_attention()
            self._attention = UlyssesAttention.register(model, config, plugin.deepspeed_config[MICRO_BATCH])
            arguments["mpu"] = self._attention.groups
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = optimizer.params
        elif optimizer is not None:
            plugin.deepspeed_config.setdefault("zero_allow_untested_optimizer", True)  # the program chose it
            arguments["optimizer"] = self._placed(optimizer)
        makes_scheduler = getattr(scheduler, "lr_scheduler_callable", None)
        if makes_scheduler is not None or type(scheduler).__name__ in OF_DEEPSPEED:
            arguments["lr_scheduler"] = makes_scheduler or scheduler
        with device_as_local_rank(state.device):
            engine, its_optimizer, _, its_scheduler = deepspeed.initialize(**arguments)
        if built is not None:
            self._names[engine] = built
        self._compile(engine)
        self._keep(engine)
        wrapped_optimizer = None if optimizer is None else DeepSpeedOptimizerWrapper(its_optimizer)
        return engine, wrapped_optimizer, self._wrap_scheduler(scheduler, its_scheduler, wrapped_optimizer)

    def _placed(self, optimizer: torch.optim.Optimizer) -> Any:
        """The CPU optimizer of DeepSpeed where optimizer states are offloaded, unless the configuration forbids it."""
        plugin = self.plugin
        device = plugin.get_value("zero_optimization.offload_optimizer.device")
        if device in NOT_OFFLOADED or not plugin.get_value("zero_force_ds_cpu_optimizer", True):
            return optimizer
        return map_pytorch_optim_to_deepspeed(optimizer)

    def _wrap_scheduler(self, scheduler: Any, its_scheduler: Any, optimizer: Any) -> Any:
        if scheduler is None:
            return None
        if isinstance(scheduler, DummyScheduler) or type(scheduler).__name__ in OF_DEEPSPEED:
            return DeepSpeedSchedulerWrapper(its_scheduler, optimizer)
        wrapped = self.prepare_scheduler(scheduler)
        wrapped.optimizers = [optimizer]
        return wrapped

    def _compile(self, engine: Any) -> None:
        settings, module = self.context.state.dynamo_plugin, engine.module
        if settings.backend == DynamoBackend.NO or is_compiled_module(module) or has_compiled_regions(module):
            return
        if settings.use_regional_compilation:
            self.compile_model(module, settings)
            return
        options = settings.to_kwargs()
        engine.compile(backend=options.pop("backend"), compile_kwargs=options)

    def _keep(self, engine: Any) -> None:
        """Keep the first engine with an optimizer, for `backward`."""
        if self.library_engine is None or not _trains(self.library_engine.engine):
            self.library_engine = DeepSpeedEngineWrapper(engine)
        elif _trains(engine):
            warn_user(
                "This Accelerator has prepared a second model to train, but backward() uses the DeepSpeed engine of "
                "the first. Create one Accelerator for each model that is trained."
            )

    def shard_sequences(self, loader: Any) -> Any:
        """Wrap a loader so that each rank yields its shard of sequences, where DeepSpeed shards them."""
        if not uses_ulysses(self.context.state.parallelism_config) or isinstance(loader, UlyssesBatches):
            return loader
        return UlyssesBatches(loader, self.context.state.device)

    @override
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Move a model that is prepared on its own to the device, without DeepSpeed."""
        return model.to(self.context.state.device) if device_placement else model

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accumulate gradients, and take the optimizer step on sync steps."""
        if self.library_engine is None:
            raise RuntimeError(
                "backward() needs a DeepSpeed engine, but no model was prepared. Pass the model and its optimizer to "
                "prepare() first."
            )
        self.library_engine.backward(loss, sync_gradients=self.gradient_state.sync_gradients, **kwargs)
        if self._num_watched_steps and self.gradient_state.sync_gradients:
            self._warn_of_unasked_clipping()

    def _warn_of_unasked_clipping(self) -> None:
        """Warn once where "auto", the default, changes gradients."""
        self._num_watched_steps -= 1
        bound, norm = self.plugin.get_value("gradient_clipping"), self.library_engine.get_global_grad_norm()
        if norm is None or not norm > bound:
            return
        self._num_watched_steps = 0
        if self.context.state.is_main_process:
            warn_user(
                f"DeepSpeed clips gradients to a norm of {bound}, because gradient_clipping is 'auto', its default; at this step their norm "
                f"was {norm:.3g}. Set DeepSpeedPlugin(gradient_clipping={bound}) if that is meant, or 0.0 not to clip."
            )

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without effect: `backward` tells DeepSpeed which steps are sync steps."""
        return nullcontext()

    @override
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without effect: DeepSpeed synchronizes at the end of its own windows."""
        return nullcontext()

    @override
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Without effect, with a warning."""
        return warn_no_join(self.name)

    @override
    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The gradient norm before the last step, at which DeepSpeed clipped as its configuration says."""
        bound = self.plugin.get_value("gradient_clipping")
        if max_norm != bound and not self._warned_of_clipping:
            self._warned_of_clipping = True
            warn_user(
                f"clip_grad_norm_(max_norm={max_norm}) has no effect with DeepSpeed, which has taken the optimizer "
                f"step in backward, with gradient_clipping={bound}. Set DeepSpeedPlugin(gradient_clipping={max_norm})."
            )
        norm: Any = None if self.library_engine is None else self.library_engine.get_global_grad_norm()
        return norm

    @override
    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Not supported: DeepSpeed takes the step in backward.

        Raises:
            ValueError: Always; the message says what to use instead.
        """
        raise ValueError(
            "clip_grad_value_() is not supported with DeepSpeed, which takes the optimizer step in backward. Set "
            "gradient_clipping, which clips by norm, in DeepSpeedPlugin or its configuration."
        )

    @override
    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return all_reduce_over_group(weight, None)

    @property
    @override
    def num_averaged(self) -> int:
        """DeepSpeed averages over batches, and sums over ranks that hold shards of one sequence."""
        return self.context.state.num_processes // self._sequence_size()

    @override
    def mean_over_tokens(self, loss: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
        """The mean loss (0-dim) over the tokens of all ranks, also where they hold shards of one batch's sequences."""
        return mean_over_tokens(loss, num_tokens, None, self.num_averaged)

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    @override
    def is_replicated(self) -> bool:
        """DeepSpeed's files are written by all ranks."""
        return False

    @override
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The full state dict in CPU memory, on the main process.

        Under ZeRO stage 3 its tensors are on the meta device on the other ranks; with tensor parallelism it is empty there.

        Raises:
            ValueError: Under ZeRO stage 3, when the program's own configuration forbids gathering weights.
        """
        engine = next((one for one in self._engines if model is one or model is one.module), None)
        if engine is None:
            return self.unwrap(model).state_dict()
        if engine.zero_optimization_partition_weights():
            if not self.plugin.may_gather_weights:
                raise ValueError(
                    "ZeRO stage 3 has sharded the weights, and the DeepSpeed configuration forbids gathering them: "
                    "zero_optimization.stage3_gather_16bit_weights_on_model_save is false. Set it to true or leave it out, "
                    "or use zero_to_fp32.py in a folder of save_state()."
                )
            full = engine._zero3_consolidated_16bit_state_dict()
            return _without_values(self.unwrap(engine)) if full is None else full
        tensors = self.unwrap(engine).state_dict()
        if engine.autotp_size() > 1:
            parameters = engine._consolidated_16bit_state_dict()
            tensors = {} if parameters is None else {**tensors, **parameters}
        return {name: _own_copy(value) for name, value in tensors.items()}

    @property
    def _engines(self) -> list[Any]:
        return [one for one in self.context.prepared.wrapped if _is_engine(one)]

    @property
    def _others(self) -> list[nn.Module]:
        """Models that were prepared on their own."""
        return [one for one in self.context.prepared.wrapped if not _is_engine(one)]

    @override
    def check_storage(self, sees_main: bool, folder: Path) -> None:
        """All ranks write into one folder."""
        check_shared_folder(sees_main, folder)

    @override
    def save(self, options: Mapping[str, Any]) -> PendingSave:
        """Have DeepSpeed write the states of all engines, each into its own folder."""
        return EnginesSave(self._engines, self._others, options)

    @override
    def open(self, request: LoadRequest) -> PendingLoad:
        """Have DeepSpeed read its own states, as plain data only; lay out those of others as it keeps them."""
        engines, others, prepared = self._engines, self._others, self.context.prepared
        if loads_as_saved(request.checkpoint, engines):
            return EnginesLoad(request, engines, others, prepared)
        return NamedStatesLoad(request, engines, others, prepared, self._names.get)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _restore_attention(self) -> None:
        if self._attention is not None:
            self._attention.restore()
            self._attention = None

    @override
    def forget(self) -> None:
        """Destroy the engine of DeepSpeed and free its memory; the configuration has its "auto" values again."""
        super().forget()
        if self._configured is not None:
            self.plugin.deepspeed_config.clear()
            self.plugin.deepspeed_config.update(self._configured)
            self._configured = None
        self._restore_attention()
        if self.library_engine is not None:
            self.library_engine.engine.destroy()
            self.library_engine = None

    @override
    def close(self) -> None:
        """Make DeepSpeed drop process groups that are about to be destroyed."""
        leave_processes()


def _trains(engine: Any) -> bool:
    return hasattr(engine.optimizer, "step")  # without an optimizer, stage 3 has another object there


def _names_in(optimizer: Any, model: nn.Module) -> list[list[str]]:
    """Names of the parameters in each group of an optimizer, which may be described by a `DummyOptim`."""
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    groups = list(optimizer.params) if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    if isinstance(optimizer, DummyOptim):
        optimizer.params = groups  # which may have been an iterator
    members = [group["params"] for group in groups] if groups and isinstance(groups[0], dict) else [groups]
    return [[names.get(one, "") for one in group] for group in members]


def _is_of_deepspeed(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("deepspeed.")


def _is_engine(model: Any) -> bool:
    return hasattr(model, "save_checkpoint")


def _without_values(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model of ZeRO stage 3 with tensors on the meta device, in their full shapes."""
    shapes = {name: getattr(weight, "ds_shape", weight.shape) for name, weight in model.named_parameters()}
    return {
        name: torch.empty(shapes.get(name, value.shape), dtype=value.dtype, device="meta")
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _own_copy(value: Any) -> Any:
    """A CPU copy of a tensor: DeepSpeed's are views of a flat buffer, all of which would be saved with a view."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
