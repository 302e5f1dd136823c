"""The Megatron-LM engine: tensor, sequence and pipeline parallelism of megatron-core for models of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from accel_data.adapter import copied_arguments
from accel_integrations.averaging import StepAverage
from accel_integrations.engines.engine import Engine, EngineContext
from accel_integrations.engines.prepare_arguments import PrepareArguments
from accel_integrations.engines.sharded_engines import warn_no_join
from accel_integrations.megatron.chunks import Chunks, build, make_config, own_chunks, wrap
from accel_integrations.megatron.core import check_installed, load, on_device, quiet
from accel_integrations.megatron.data.batches import Limits
from accel_integrations.megatron.data.datasets import SteppedLoader, check_model, dummy_places, fill_dummies
from accel_integrations.megatron.data.sequences import SequenceShares
from accel_integrations.megatron.families.table import shape_of
from accel_integrations.megatron.fields import check_fields, check_model_arguments
from accel_integrations.megatron.groups import (
    Degrees,
    check_for_experts,
    data_shard,
    drop_groups,
    make_groups,
    start_random_numbers,
)
from accel_integrations.megatron.model import MegatronEngine, Parts
from accel_integrations.megatron.placeholders import MegatronLMDummyScheduler
from accel_integrations.megatron.prepared import (
    RULES,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    make_scheduler,
    names_in,
    to_meta,
)
from accel_integrations.megatron.programs import Hooks, run_arguments
from accel_integrations.megatron.schedule import Schedule
from accel_integrations.megatron.stored import MegatronLoad, Storing
from accel_integrations.megatron.weights.loss_scale import DTYPES, ShardedLossScale, make_own_precision
from accel_integrations.megatron.weights.optimizer import ShardedOptimizer
from accel_integrations.megatron.weights.sharded import ShardedWeights
from accel_integrations.prepared.prepared import keep
from accel_integrations.training_state.formats.sharded import check_shared_folder
from accel_integrations.training_state.interface import LoadRequest, PendingLoad
from accel_state.enums import DynamoBackend
from accel_state.mesh_axes import DataShard
from accel_state.supervision import report_progress
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.megatron.families.shape import ModelShape
    from accel_integrations.precision.precision import Precision
    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_state.settings.data import DataLoaderConfiguration
    from accel_state.settings.megatron import MegatronLMPlugin


@final
class MegatronLMEngine(Engine):
    """megatron-core: the call of the prepared model takes a whole training step."""

    name = "megatron-lm"
    accepts_transforms = False
    steps_torch_optimizers = False
    unguarded_because = "Megatron-LM takes the steps with the optimizer that it makes"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.degrees = Degrees(1, 1, 1)
        self.storing = Storing()
        self._arguments = PrepareArguments()
        self._objects: tuple[Any, Any, Any] | None = None
        self._dummies: list[int] = []
        self._warned_of_clipping = False

    @property
    def trained(self) -> MegatronEngine | None:
        """The prepared model; None before."""
        return self.storing.trained

    # ---- before anything starts ---------------------------------------------------------------------------------

    @override
    def check(self) -> None:
        """Check the settings, then make the process groups of megatron-core.

        Raises:
            ValueError: For degrees that do not divide the number of processes, and settings that cannot be combined.
            NotImplementedError: For settings that this engine does not have.
            MissingLibraryError: megatron-core is not installed.
        """
        state = self.context.state
        check_installed()
        check_fields(self.plugin, warn=state.is_main_process)
        degrees = Degrees.of(self.plugin, state.num_processes)
        if state.parallelism_config is not None and state.parallelism_config.active_mesh_dims:
            raise ValueError(
                "ParallelismConfig cannot be combined with Megatron-LM, which has degrees of its own. Set tp_degree and "
                "pp_degree of MegatronLMPlugin."
            )
        if self.gradient_state.num_steps > 1 or self.averaging.is_by_window:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_state.num_steps} cannot be combined with Megatron-LM, which takes "
                "a step in each call of the model. Set num_micro_batches of MegatronLMPlugin."
            )
        if state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                f"dynamo_backend={state.dynamo_plugin.backend.value!r} would compile megatron-core's schedule. Leave it out."
            )
        make_groups(degrees)
        start_random_numbers(state.device)
        self.degrees = degrees

    @override
    def make_precision(self, wanted: str) -> Precision:
        """Without autocast: megatron-core computes on a copy of the parameters in that dtype."""
        return make_own_precision(wanted, self.context.state.device, self.context.handlers)

    @override
    def make_step_average(self) -> StepAverage:
        """Losses are averaged within the call of the model."""
        return StepAverage(self.gradient_state, divides=False)

    @override
    def data_shard(self) -> DataShard:
        """Ranks of one replica read the same samples."""
        return data_shard()

    @property
    @override
    def readers(self) -> Any:
        """The ranks that hold the same shards of different replicas."""
        return self.averaging_group

    @property
    def plugin(self) -> MegatronLMPlugin:
        """The settings in use."""
        plugin: MegatronLMPlugin = self.context.state.megatron_lm_plugin
        return plugin

    # ---- preparing ----------------------------------------------------------------------------------------------

    @override
    def before_prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Find the model, its optimizer and its scheduler, and check that they can be trained.

        Raises:
            ValueError: They cannot; the message says why.
            NotImplementedError: They cannot be trained on the datasets of a `MegatronLMDummyDataLoader`.
            FileNotFoundError: Files of an indexed dataset are missing.
        """
        self._objects = None
        self._dummies = dummy_places(objects)
        objects = fill_dummies(objects, self.plugin, self.degrees.data)
        self._arguments = arguments = PrepareArguments.find(objects, RULES, self.trained is not None)
        loaders = [one for one in objects if isinstance(one, DataLoader) and one.batch_size is not None]
        if sizes := [int(loader.batch_size or 1) for loader in loaders]:
            smallest = self.plugin.is_train_batch_min
            self.plugin.set_training_args(min(sizes) if smallest else max(sizes), self.degrees.data)
        if arguments.model is None:
            return list(objects)
        model, optimizer, scheduler = self._objects = arguments.pick(objects)
        check_model(self._shape(model).task, self._dummies, self.plugin)
        if optimizer is not None:
            names_in(optimizer, model)
        if isinstance(scheduler, MegatronLMDummyScheduler) and optimizer is None:
            raise ValueError("prepare() got a MegatronLMDummyScheduler without an optimizer. Pass both to one call.")
        return [None if index in arguments.positions else item for index, item in enumerate(objects)]

    @override
    def after_prepare(self, results: list[Any]) -> list[Any]:
        """Build the model from what `before_prepare` found."""
        arguments, objects = self._arguments, self._objects
        self._objects = None
        for place in self._dummies:
            results[place] = SteppedLoader(results[place])
        if objects is None:
            return results
        record, (model, optimizer, scheduler) = self.context.prepared, objects
        engine = self._build(model, optimizer)
        if scheduler is not None:
            if isinstance(scheduler, MegatronLMDummyScheduler):
                scheduler = make_scheduler(scheduler, optimizer, self.plugin, self.degrees.data)
            engine.scheduler = keep(record.schedulers, self.prepare_scheduler(scheduler))
        record.keep_model(model, engine)
        for index, one in zip(
            (arguments.model, arguments.optimizer, arguments.scheduler),
            (engine, engine.optimizer, engine.scheduler),
            strict=True,
        ):
            if index is not None:
                results[index] = one
        return results

    @override
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Build a model that is prepared on its own, for evaluation.

        Raises:
            ValueError: Another model was prepared already, or this one cannot be trained by Megatron-LM.
        """
        PrepareArguments.find([model], RULES, self.trained is not None)
        self._shape(model)
        return self._build(model, None)

    def _shape(self, model: nn.Module) -> ModelShape:
        shape = shape_of(model)
        check_model_arguments(self.plugin.other_megatron_args or {}, shape)
        shape.check(self.degrees, self.plugin)
        if shape.num_experts is not None:
            check_for_experts(self.degrees, self.plugin)
        return shape

    def _build(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> MegatronEngine:
        state, plugin, degrees = self.context.state, self.plugin, self.degrees
        shape, device = self._shape(model), state.device
        names = None if optimizer is None else names_in(optimizer, model)
        hooks = Hooks.of(plugin, shape.task, lambda: run_arguments(plugin, model, shape, degrees))
        stored, shares = next(model.parameters()).dtype, SequenceShares.here()
        dtype = DTYPES[state.mixed_precision] or stored
        with on_device(device), quiet():
            chunks = self._chunks(shape, hooks, dtype)
            listed = shape.weights(shape, shape.num_rows(degrees))
            trained = {name: one.requires_grad for name, one in model.named_parameters(remove_duplicate=False)}
            weights = ShardedWeights(listed, chunks.named_parameters(), stored)
            weights.frozen(trained.__getitem__)
            weights.load(dict(model.named_parameters(remove_duplicate=False)))
        self.storing.buffers = to_meta(model)
        parts = Parts(
            original=model,
            chunks=chunks,
            weights=weights,
            schedule=Schedule(chunks, shape.task, shape.num_tokens, device, hooks),
            limits=Limits(
                shape.task,
                shape.max_length,
                shape.window,
                shape.learns_positions,
                shares.multiple * (degrees.tensor if chunks.config.sequence_parallel else 1),
                plugin.num_micro_batches,
                shares,
                hooks.reads_batches,
            ),
            device=device,
            max_norm=plugin.gradient_clipping,
            return_logits=plugin.return_logits,
            after_step=self._after_step,
            handler=hooks.handler,
        )
        engine = MegatronEngine(None, parts, None, None)
        engine.train(model.training)
        if optimizer is not None and names is not None:
            loss_scale = ShardedLossScale(
                lambda: self.precision.scaler, device, sums=chunks.config.calculate_per_token_loss
            )
            engine.sharded = ShardedOptimizer(optimizer, names, weights, plugin.use_distributed_optimizer, loss_scale)
            chunks.config.grad_scale_func = loss_scale.scale
            engine.optimizer = keep(self.context.prepared.optimizers, MegatronLMOptimizerWrapper(optimizer))
        self.storing.trained = engine
        return engine

    def _chunks(self, shape: ModelShape, hooks: Hooks, dtype: torch.dtype) -> Chunks:
        """This rank's part of a model, built here or by functions of the program."""
        plugin, device = self.plugin, self.context.state.device
        provider, prepare = plugin.custom_model_provider_function, plugin.custom_prepare_model_function
        per_token = plugin.calculate_per_token_loss and not hooks.averages_micro_batches
        if prepare is not None and provider is not None:
            return own_chunks(shape, self.degrees, prepare, provider, per_token=per_token)
        config = make_config(shape, plugin, self.degrees, dtype, device, per_token=per_token)
        return wrap(config, build(shape, config, self.degrees, device, provider))

    @override
    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler, which steps when the model is called, unless the program steps it itself."""
        if not self.context.step_scheduler_with_optimizer:
            return super().prepare_scheduler(scheduler)
        wrapped = MegatronLMSchedulerWrapper(scheduler, self.context.prepared.optimizers)
        wrapped.split_batches = self.context.split_batches
        wrapped._steps_per_call = 1 if wrapped.split_batches else self.degrees.data
        return wrapped

    @override
    def start_loader(self, loader: DataLoader[Any], settings: DataLoaderConfiguration) -> DataLoader[Any]:
        """A loader that reads all micro-batches of a step at once; the batches of the given one are micro-batches."""
        count = self.plugin.num_micro_batches
        if count == 1:
            return loader
        arguments = copied_arguments(loader)
        if loader.batch_size is not None:
            order: dict[str, Any] = {"batch_size": loader.batch_size * count, "drop_last": loader.drop_last}
            if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
                order["sampler"] = loader.sampler
            return DataLoader(loader.dataset, **arguments, **order)
        batches = copy.copy(loader.batch_sampler)
        if not isinstance(getattr(batches, "batch_size", None), int):
            return loader  # the program decides what a batch is
        batches.batch_size *= count  # type: ignore[union-attr]
        return DataLoader(loader.dataset, **arguments, batch_sampler=batches)

    def _after_step(self) -> None:
        report_progress()
        for scheduler in self.context.prepared.schedulers:
            if isinstance(scheduler, MegatronLMSchedulerWrapper):
                scheduler.step_after_optimizer()

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Do nothing: the call of the model has done it."""

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without effect: gradients are averaged once per call of the model."""
        return nullcontext()

    @override
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without effect: a step is one call."""
        return nullcontext()

    @override
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Without effect, with a warning."""
        return warn_no_join(self.name)

    @override
    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The gradient norm before the last step, at which gradients were clipped as the plugin says."""
        bound = self.plugin.gradient_clipping
        if max_norm != bound and not self._warned_of_clipping:
            self._warned_of_clipping = True
            warn_user(
                f"clip_grad_norm_(max_norm={max_norm}) has no effect with Megatron-LM: the call of the model has taken the "
                f"step, with gradient_clipping={bound}. Set MegatronLMPlugin(gradient_clipping={max_norm})."
            )
        return None if self.trained is None else self.trained.grad_norm

    @override
    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Not supported: the call of the model has taken the step.

        Raises:
            ValueError: Always; the message says what to use instead.
        """
        raise ValueError(
            "clip_grad_value_() is not supported with Megatron-LM, where the call of the model takes the step. Set "
            "gradient_clipping of MegatronLMPlugin, which clips by norm."
        )

    @property
    @override
    def num_averaged(self) -> int:
        """The number of replicas."""
        return self.degrees.data

    @property
    @override
    def averaging_group(self) -> Any:
        """The ranks that hold the same shards of different replicas."""
        return load("parallel_state").get_data_parallel_group()

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    @override
    def is_replicated(self) -> bool:
        """Each rank holds its part."""
        return False

    @override
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        engine = self.storing.model_of(model)
        if engine is None:
            return self.unwrap(model).state_dict()
        return self.storing.full_state_dict(engine, self.context.keeps_full_states)

    @override
    def full_optimizer_state(self, optimizer: AcceleratedOptimizer) -> dict[str, Any]:
        return self.storing.full_optimizer_state(optimizer, self.context.keeps_full_states)

    @override
    def load_optimizer_state(self, optimizer: AcceleratedOptimizer, state: dict[str, Any]) -> None:
        self.storing.load_optimizer_state(optimizer, state)

    @override
    def check_storage(self, sees_main: bool, folder: Path) -> None:
        """All ranks read one folder."""
        check_shared_folder(sees_main, folder)

    @override
    def open(self, request: LoadRequest) -> PendingLoad:
        """Read full states, or states by names of parameters; every rank takes its shards."""
        return MegatronLoad(request, self.context.prepared, self.storing)

    # ---- the end ------------------------------------------------------------------------------------------------

    @override
    def forget(self) -> None:
        """Drop the model."""
        super().forget()
        self.storing = Storing()

    @override
    def close(self) -> None:
        """Forget the process groups of megatron-core, which are about to be destroyed."""
        drop_groups()
