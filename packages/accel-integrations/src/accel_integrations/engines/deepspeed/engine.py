"""DeepSpeed behind the interface of all engines: it owns gradients, steps and states; this says when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from accel_integrations.averaging import StepAverage
from accel_integrations.checkpoints.pending import CheckpointFiles, PendingLoad, PendingSave
from accel_integrations.checkpoints.sharded_states import check_shared_folder
from accel_integrations.deepspeed_dummies import DummyOptim, DummyScheduler
from accel_integrations.engines.deepspeed.active import get_active_deepspeed_plugin
from accel_integrations.engines.deepspeed.config import MICRO_BATCH, settle
from accel_integrations.engines.deepspeed.optimizers import map_pytorch_optim_to_deepspeed
from accel_integrations.engines.deepspeed.prepare_arguments import (
    OF_DEEPSPEED,
    PrepareArguments,
    check_fit,
    check_parts,
)
from accel_integrations.engines.deepspeed.sequence import SharedAttention, SharedBatches, shares_sequences
from accel_integrations.engines.deepspeed.startup import join_processes, leave_processes, load_library
from accel_integrations.engines.deepspeed.states import EnginesLoad, EnginesSave
from accel_integrations.engines.deepspeed.wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from accel_integrations.engines.engine import Engine, EngineContext
from accel_integrations.parallel.module_states import all_reduce_over_group
from accel_integrations.parallel.replicas import mean_over_tokens
from accel_integrations.prepared.prepared import keep
from accel_ops.modules import has_compiled_regions, is_compiled_module
from accel_state.enums import DynamoBackend
from accel_state.mesh import DataPlace
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.precision.precision import Precision
    from accel_state.settings.deepspeed import DeepSpeedPlugin

NOT_OFFLOADED = (None, "none")


@final
class DeepSpeedEngine(Engine):
    """`deepspeed.initialize`: what is prepared together becomes one engine of DeepSpeed, which steps in backward."""

    name = "deepspeed"
    accepts_transforms = False
    compiles_in_place = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.library_engine: Any = None
        """What runs backward: the first of DeepSpeed's engines that trains."""
        self._together = PrepareArguments()
        self._objects: tuple[Any, Any, Any] | None = None
        self._attention: SharedAttention | None = None
        self._warned_of_clipping = False

    # ---- before anything starts ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what DeepSpeed does not do, then have it join the processes.

        Raises:
            ValueError: For float16 on a CPU, averages over windows, and axes that DeepSpeed does not know.
        """
        state = self.context.state
        if state.device.type == "cpu" and state.mixed_precision == "fp16":
            raise ValueError("mixed_precision='fp16' is not possible with DeepSpeed on a CPU: choose 'bf16', or 'no'.")
        if self.averaging.is_by_window:
            raise ValueError(
                "GradientAccumulationPlugin(average_over=...) needs gradients at the end of a window, but DeepSpeed "
                "steps in backward: leave it out."
            )
        self._check_axes()
        load_library(state.device)
        join_processes(state.device, state.backend)  # models may be built in shards before any is prepared

    def _check_axes(self) -> None:
        config = self.context.state.parallelism_config
        if config is None:
            return
        refused = [f"{axis}_size" for axis in config.active_mesh_dims if axis != "sp"]
        if config.sp_enabled and config.sp_backend != "deepspeed":
            refused.append(f"sp_backend={config.sp_backend!r}")
        if refused:
            raise ValueError(
                f"ParallelismConfig asks for {', '.join(refused)}, which cannot be combined with DeepSpeed: it shards by "
                "itself (zero_stage), divides layers by tensor_parallel in its own configuration, and sequences by sp_size "
                "with sp_backend='deepspeed'."
            )

    def make_precision(self, wanted: str) -> Precision:
        """DeepSpeed converts the model itself, but for 8-bit floats."""
        asked = self.context.state._mixed_precision
        return super().make_precision("fp8" if asked == "fp8" else "no")

    def make_step_average(self) -> StepAverage:
        """DeepSpeed divides losses in backward."""
        return StepAverage(self.gradient_state, divides=False)

    def data_place(self) -> DataPlace:
        """All processes read different samples, but for those that share layers."""
        state = self.context.state
        share = self._tensor_parallel_size()
        return DataPlace(state.process_index // share, state.num_processes // share)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The settings in use."""
        return get_active_deepspeed_plugin(self.context.state)

    def _sequence_size(self) -> int:
        """How many processes share every sequence."""
        config = self.context.state.parallelism_config
        return config.sp_size if config is not None and shares_sequences(config) else 1

    def _tensor_parallel_size(self) -> int:
        return int(self.plugin.get_value("tensor_parallel.autotp_size") or 1)

    # ---- preparing ----------------------------------------------------------------------------------------------

    def before_prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Find the model with its optimizer and its scheduler, of which one DeepSpeed engine is made, and settle "auto".

        Raises:
            ValueError: For objects that do not belong together, or do not fit the configuration.
        """
        self._objects = None
        self._together = found = PrepareArguments.find(objects)
        if found.model is None:
            return list(objects)
        model, optimizer, scheduler = found.pick(objects)
        config = self.plugin.deepspeed_config
        check_fit(optimizer, scheduler, config)
        check_parts(model, optimizer, config)
        readers = self.data_place().count
        settle(
            self.plugin, self.context, objects, model, optimizer, scheduler, readers, readers // self._sequence_size()
        )
        self._objects = (model, optimizer, scheduler)
        return [None if index in found.positions else item for index, item in enumerate(objects)]

    def after_prepare(self, results: list[Any]) -> list[Any]:
        """Build one engine of what was found; everything else was prepared as everywhere."""
        found, objects = self._together, self._objects
        self._objects = None
        if objects is None:
            return results
        record = self.context.prepared
        engine, optimizer, scheduler = self._build(*objects)
        record.keep_model(self.unwrap(engine), engine)
        for kept, made in ((record.optimizers, optimizer), (record.schedulers, scheduler)):
            if made is not None:
                keep(kept, made)
        for index, made in zip(
            (found.model, found.optimizer, found.scheduler), (engine, optimizer, scheduler), strict=True
        ):
            if index is not None:
                results[index] = made
        return [self.shard_sequences(one) if one in record.dataloaders else one for one in results]

    def _build(self, model: nn.Module, optimizer: Any, scheduler: Any) -> tuple[Any, Any, Any]:
        """What stands for a model, its optimizer and its scheduler from now on."""
        import deepspeed

        plugin, state = self.plugin, self.context.state
        plugin.set_moe_leaf_modules(model)
        model = self.precision.wrap_forward(self.precision.convert(model))
        arguments: dict[str, Any] = {"model": model, "config_params": plugin.deepspeed_config}
        if (config := state.parallelism_config) is not None and shares_sequences(config):
            self._restore_attention()
            self._attention = SharedAttention.register(model, config, plugin.deepspeed_config[MICRO_BATCH])
            arguments["mpu"] = self._attention.groups
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = optimizer.params
        elif optimizer is not None:
            plugin.deepspeed_config.setdefault("zero_allow_untested_optimizer", True)  # the program chose it
            arguments["optimizer"] = self._placed(optimizer)
        makes_scheduler = getattr(scheduler, "lr_scheduler_callable", None)
        if makes_scheduler is not None or type(scheduler).__name__ in OF_DEEPSPEED:
            arguments["lr_scheduler"] = makes_scheduler or scheduler
        engine, its_optimizer, _, its_scheduler = deepspeed.initialize(**arguments)
        self._compile(engine)
        self._keep(engine)
        wrapped_optimizer = None if optimizer is None else DeepSpeedOptimizerWrapper(its_optimizer)
        return engine, wrapped_optimizer, self._wrap_scheduler(scheduler, its_scheduler, wrapped_optimizer)

    def _placed(self, optimizer: torch.optim.Optimizer) -> Any:
        """DeepSpeed's own optimizer where states are kept in CPU memory, unless the configuration forbids it."""
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
        """The first engine that trains is the one that `backward` steps."""
        if self.library_engine is None or not _trains(self.library_engine.engine):
            self.library_engine = DeepSpeedEngineWrapper(engine)
        elif _trains(engine):
            warn_user(
                "This Accelerator has prepared a second model to train, but backward() goes through the DeepSpeed engine "
                "of the first: make an Accelerator for each model that is trained."
            )

    def shard_sequences(self, loader: Any) -> Any:
        """The loader of which each rank yields its shard of sequences, where DeepSpeed shards them."""
        if not shares_sequences(self.context.state.parallelism_config) or isinstance(loader, SharedBatches):
            return loader
        return SharedBatches(loader, self.context.state.device)

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Move a model that is prepared on its own to the device; DeepSpeed has no part in it."""
        return model.to(self.context.state.device) if device_placement else model

    # ---- stepping -----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accumulate gradients, and at the end of a window step."""
        if self.library_engine is None:
            raise RuntimeError(
                "backward() needs a DeepSpeed engine, but no model was prepared: pass model and optimizer to prepare() first."
            )
        self.library_engine.backward(loss, sync_gradients=self.gradient_state.sync_gradients, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing to hold back: DeepSpeed is told in backward where windows end."""
        return nullcontext()

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The joint norm that DeepSpeed had, and bounded as its configuration says, before it stepped."""
        bound = self.plugin.get_value("gradient_clipping")
        if max_norm != bound and not self._warned_of_clipping:
            self._warned_of_clipping = True
            warn_user(
                f"clip_grad_norm_(max_norm={max_norm}) comes too late under DeepSpeed, which stepped in backward with "
                f"gradient_clipping={bound}: set DeepSpeedPlugin(gradient_clipping={max_norm})."
            )
        norm: Any = None if self.library_engine is None else self.library_engine.get_global_grad_norm()
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Not possible: DeepSpeed stepped in backward.

        Raises:
            ValueError: Saying what to use instead.
        """
        raise ValueError(
            "clip_grad_value_() is not possible under DeepSpeed, which steps in backward: set gradient_clipping, which "
            "bounds the norm, in DeepSpeedPlugin or its configuration."
        )

    def reduce_gradient_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Add a weight up over all processes."""
        return all_reduce_over_group(weight, None)

    @property
    def num_averaged(self) -> int:
        """DeepSpeed averages over batches, and adds up what processes that share sequences contribute."""
        return self.context.state.num_processes // self._sequence_size()

    def mean_over_tokens(self, loss: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
        """The mean loss over the tokens of all processes, also where they share sequences of one batch."""
        return mean_over_tokens(loss, num_tokens, None, self.num_averaged)

    # ---- storing ------------------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole model's tensors in CPU memory, on the main process.

        Under stage 3, and where processes share layers, there is nothing on the others.

        Raises:
            ValueError: Under stage 3, when the configuration does not allow to gather weights.
        """
        engine = next((one for one in self._engines if model is one or model is one.module), None)
        if engine is None:
            return super().full_state_dict(model)
        if engine.zero_optimization_partition_weights():
            if not engine.zero_gather_16bit_weights_on_model_save():
                raise ValueError(
                    "ZeRO stage 3 has divided the weights, and the configuration does not allow to gather them: set "
                    "DeepSpeedPlugin(zero3_save_16bit_model=True), "
                    "zero_optimization.stage3_gather_16bit_weights_on_model_save, or use zero_to_fp32.py in a folder of "
                    "save_state()."
                )
            return engine._zero3_consolidated_16bit_state_dict() or {}
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

    def check_storage(self, sees_main: bool, folder: Path) -> None:
        """All ranks write into one folder."""
        check_shared_folder(sees_main, folder)

    def save(self, options: Mapping[str, Any]) -> PendingSave:
        """Have DeepSpeed write all engines, each into a folder of its own."""
        return EnginesSave(self._engines, self._others, options)

    def open(
        self,
        checkpoint: CheckpointFiles,
        location: torch.device,
        load_kwargs: Mapping[str, Any],
        model_kwargs: Mapping[str, Any],
    ) -> PendingLoad:
        """Have DeepSpeed read them, as data only."""
        return EnginesLoad(checkpoint, self._engines, self._others, self.context.prepared, model_kwargs)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _restore_attention(self) -> None:
        if self._attention is not None:
            self._attention.restore()
            self._attention = None

    def forget(self) -> None:
        """Let go of the engine that backward stepped, and of the memory it holds."""
        self._restore_attention()
        if self.library_engine is not None:
            self.library_engine.engine.destroy()
            self.library_engine = None

    def close(self) -> None:
        """Let DeepSpeed forget process groups that are about to end."""
        leave_processes()


def _trains(engine: Any) -> bool:
    return hasattr(engine.optimizer, "step")  # without an optimizer, stage 3 has something else there


def _is_engine(model: Any) -> bool:
    return hasattr(model, "save_checkpoint")


def _own_copy(value: Any) -> Any:
    """A tensor outside of the flat buffer of which DeepSpeed's are views: saved views would take all of it along."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
