"""Pipelines: an engine around another one, under which every rank trains some stages of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.engines.engine import Engine
from accel_integrations.engines.placing import move_model
from accel_integrations.engines.sharded_engines import warn_no_join
from accel_integrations.parallel.full_state import load_full_optimizer_state
from accel_integrations.parallel.module_states import broadcast_to_group
from accel_integrations.parallel.pipeline.gradients import GradientSync, clip_over_stages, sync_shared_parameters
from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_integrations.parallel.pipeline.layout import OptimizerLayout, StageLayout
from accel_integrations.parallel.pipeline.model import Pipeline, PipelinedModel
from accel_integrations.parallel.pipeline.split import ModelSplit, split_model
from accel_integrations.parallel.pipeline.stage import StagedModel, check_nothing_is_collected
from accel_integrations.prepared.prepared import Notes
from accel_integrations.training_state.formats.full import FullStates, FullStatesLoad
from accel_integrations.training_state.formats.sharded import is_by_name
from accel_integrations.training_state.interface import CheckpointFiles, LoadRequest, PendingLoad
from accel_integrations.training_state.loading import read_full_optimizer_state
from accel_integrations.training_state.reader import open_model_state, open_optimizer_state
from accel_state.enums import DynamoBackend

if TYPE_CHECKING:
    from accel_integrations.engines.fsdp2 import Sharding
    from accel_integrations.precision.precision import Precision
    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_integrations.prepared.scheduler import AcceleratedScheduler
    from accel_state.settings.parallelism import PipelineParallelConfig


@dataclass(frozen=True)
class _HeldStages:
    """The stages of one prepared model that this rank holds."""

    model: nn.Module
    split: ModelSplit
    layout: StageLayout
    gradient_sync: GradientSync
    group: PipelineGroup

    @property
    def counted_elsewhere(self) -> set[int]:
        """Ids of parameters whose gradients another rank counts in the gradient norm."""
        parameters = self.layout.own_parameters(self.model)
        shared = self.layout.shared_parameters(self.group)
        return {id(parameters[name]) for name, ranks in shared.items() if self.group.rank in ranks[1:]}


@final
class PipelinedEngine(Engine):
    """Splits models into stages, and leaves everything else to another engine.

    The prepared model is called with the full batch on every rank of a pipeline and returns what the unsplit model
    would; its backward pass runs through the stages. Gradients of parameters that several stages or replicas hold are
    reduced once per accumulation window, before clipping or the optimizer step.

    Args:
        inner: The engine that trains the stages of each rank.
    """

    name = "pipelined"

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        super().__init__(inner.context)
        config = self.context.state.parallelism_config
        assert config is not None
        self._config = config
        self._settings: PipelineParallelConfig = config.pp_handler  # type: ignore[assignment] # made with pp_size
        self._held: Notes[nn.Module, _HeldStages] = Notes()
        self._called_with: list[torch.optim.Optimizer] = []
        self._optimizers: Notes[Any, OptimizerLayout] = Notes()

    # ---- before anything starts ---------------------------------------------------------------------------------

    @override
    def check(self) -> None:
        """Check that the settings can be combined with pipelines.

        Raises:
            ValueError: They cannot; the message names the conflict and the allowed settings.
        """
        state, config, settings = self.context.state, self._config, self._settings
        others = [axis for axis in config.active_mesh_dims if axis not in ("pp", "dp_replicate", "dp_shard")]
        if others:
            raise ValueError(
                f"pp_size={config.pp_size} cannot be combined with {', '.join(others)}. Pipelines can be combined with "
                "dp_replicate, or with dp_shard and FSDP version 2."
            )
        self._check_sharding()
        if state.mixed_precision == "fp16":
            raise ValueError(
                f"mixed_precision='fp16' is not supported with pp_size={config.pp_size}: all stages would need one "
                "loss scale, but each sees other gradients. Choose 'bf16' or 'no'."
            )
        if state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                f"dynamo_backend={state.dynamo_plugin.backend.value!r} would compile the communication between stages. "
                "Compile the blocks of the model with torch.compile before preparing it."
            )
        stages = config.pp_size * (settings.stages_per_rank or 1)
        count = settings.num_microbatches
        if count is not None and count < stages:
            raise ValueError(
                f"num_microbatches={count} would leave some of the {stages} stages idle all the time. Choose at least "
                f"{stages}, or None for {stages}."
            )
        if count is not None and settings.schedule == "interleaved1f1b" and count % config.pp_size:
            raise ValueError(
                f"num_microbatches={count} with schedule='interleaved1f1b' must be a multiple of "
                f"pp_size={config.pp_size}."
            )
        if settings.broadcast_outputs and settings.schedule != "gpipe":
            raise ValueError(
                f"broadcast_outputs=True needs the outputs of all micro-batches, which schedule={settings.schedule!r} "
                "does not keep. Choose schedule='gpipe'."
            )

    def _check_sharding(self) -> None:
        config = self._config
        if config.dp_shard_enabled and not hasattr(type(self.inner), "sharding"):
            raise ValueError(
                f"pp_size={config.pp_size} with dp_shard_size={config.dp_shard_size} shards the parameters of each "
                "stage, which needs FSDP version 2. Pass FullyShardedDataParallelPlugin(fsdp_version=2), or use these "
                "processes for dp_replicate_size."
            )
        self.inner.check()
        if self._sharding is not None and (self._settings.stages_per_rank or 1) > 1:
            raise ValueError(
                f"stages_per_rank={self._settings.stages_per_rank} cannot be combined with "
                f"dp_shard_size={config.dp_shard_size}. Choose schedule='1f1b' or 'gpipe'."
            )

    @property
    def _sharding(self) -> Sharding | None:
        """How the inner engine shards parameters; None where it does not."""
        sharding: Sharding | None = getattr(self.inner, "sharding", None)
        return sharding

    @override
    def make_precision(self, wanted: str) -> Precision:
        return self.inner.precision

    # ---- preparing ----------------------------------------------------------------------------------------------

    @override
    def before_prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Remember the optimizers of this call: their models may come after them."""
        self._called_with = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
        return list(objects)

    @override
    def after_prepare(self, results: list[Any]) -> list[Any]:
        """Remove parameters of other ranks from optimizers that were made for full models."""
        self._called_with = []
        for optimizer in self.context.prepared.optimizers:
            self._keep_own_parameters(optimizer.optimizer)
        return results

    @override
    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Split the model and keep the stages of this rank, on its device.

        Raises:
            ValueError: When the model cannot be split as asked.
        """
        state = self.context.state
        mesh = self._config.axis_mesh("pp")
        assert mesh is not None
        group = PipelineGroup(mesh.get_group(), mesh.size() * (self._settings.stages_per_rank or 1), state.device)
        split = split_model(model, group.num_stages, self._settings.split_points)
        layout = StageLayout.of(model, split)
        config = getattr(model, "config", None)
        check_nothing_is_collected(vars(config) if hasattr(config, "__dict__") else {}, "the model's configuration")
        staged = StagedModel(model, split, group.held, state.device)
        staged.release()
        model.register_load_state_dict_pre_hook(layout.complete_ties)
        if device_placement:
            move_model(model, state.device)
        shared, replicas = layout.shared_parameters(group), self.averaging_group
        sync_shared_parameters(group, shared, layout.own_parameters(model))
        if replicas is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                broadcast_to_group(tensor, replicas)
        if self._sharding is not None:
            self._sharding.shard_each(staged.held_modules())
            layout.note_names(model)
        gradient_sync = GradientSync(group, shared, layout.own_parameters(model), replicas)
        pipeline = Pipeline(staged, group, self._settings, self._is_last_batch)
        pipeline.on_backward = gradient_sync.note_backward
        self._held[model] = _HeldStages(model, split, layout, gradient_sync, group)
        return PipelinedModel(model, pipeline)

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """Wrap an optimizer; one whose model is prepared already loses the parameters of other ranks at once."""
        if not any(one is optimizer for one in self._called_with):
            self._keep_own_parameters(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    @override
    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler; it steps once per batch, not once per rank."""
        wrapped = super().prepare_scheduler(scheduler)
        if not wrapped.split_batches:
            wrapped._steps_per_call = self.data_shard().count
        return wrapped

    def _is_last_batch(self) -> bool:
        return bool(self.gradient_state.end_of_dataloader)

    @property
    def _layouts(self) -> list[StageLayout]:
        models = (self.unwrap(model) for model in self.context.prepared.models)
        return [self._held[model].layout for model in models if model in self._held]

    @property
    def _group(self) -> PipelineGroup:
        return next(iter(self._held.values())).group

    def _keep_own_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        layouts = self._layouts
        if optimizer in self._optimizers or not layouts:
            return
        parameters = [parameter for held in self._held.values() for parameter in held.model.parameters()]
        layout = OptimizerLayout(optimizer, layouts, self._group)
        layout.keep_own(optimizer, parameters, layouts)
        self._optimizers[optimizer] = layout

    # ---- stepping -----------------------------------------------------------------------------------------------

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without effect: gradients are synchronized only at the end of an accumulation window."""
        return nullcontext()

    @override
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without effect, as `no_sync`."""
        return nullcontext()

    @override
    def join(self, joinables: Sequence[Any], *, even_batches: bool | None) -> AbstractContextManager[None]:
        """Without effect, with a warning."""
        return warn_no_join(self.name)

    @override
    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Synchronize gradients, unless that was done, and take an optimizer step."""
        self._finish_gradients()
        return self.inner.step(optimizer, closure)

    @override
    def unscale_gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Synchronize and unscale gradients, at the end of an accumulation window."""
        self._finish_gradients()
        self.inner.unscale_gradients(optimizers)

    @override
    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the total gradient norm over all stages to `max_norm`."""
        if not self._held:
            return self.inner.clip_grad_norm_(parameters, max_norm, norm_type)
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        counted_elsewhere = {one for held in self._held.values() for one in held.counted_elsewhere}
        return clip_over_stages(chosen, counted_elsewhere, max_norm, norm_type, self._group, self.clips_only_finite)

    def _finish_gradients(self) -> None:
        if self.gradient_state.sync_gradients:
            for held in self._held.values():
                held.gradient_sync.finish()

    @property
    @override
    def num_averaged(self) -> int:
        """The number of replicas of the pipeline."""
        return self._config.data_parallel_size

    # ---- storing ------------------------------------------------------------------------------------------------

    @property
    @override
    def is_replicated(self) -> bool:
        """Each rank holds its stages."""
        return False

    @override
    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        inner = self.unwrap(model)
        held = self._held.get(inner)
        if held is None:
            return self.inner.full_state_dict(model)
        return held.layout.full_state_dict(inner.state_dict(), self._group, self.context.keeps_full_states)

    @override
    def full_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        plain = _plain(optimizer)
        layout = self._optimizers.get(plain)
        if layout is None:
            return optimizer.state_dict()
        return layout.full_optimizer_state(plain, self._layouts, self.context.keeps_full_states)

    @override
    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load a full state dict; each rank keeps the entries of its own parameters."""
        load_full_optimizer_state(optimizer, self.own_optimizer_state(optimizer, state))

    @override
    def own_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The state of the parameters in this rank's stages."""
        plain = _plain(optimizer)
        layout = self._optimizers.get(plain)
        return state if layout is None else layout.own_entries(state, plain, self._layouts)

    @override
    def built_names(self, optimizer: torch.optim.Optimizer) -> Sequence[Sequence[str]] | None:
        """The names of the unsplit model's parameters; made up for those that are in no split model."""
        layout = self._optimizers.get(optimizer)
        if layout is None:
            return None
        return [
            [f"(parameter {number})" if name is None else name[1] for number, name in enumerate(names)]
            for names in layout.param_groups
        ]

    @override
    def open(self, request: LoadRequest) -> PendingLoad:
        """Read states; of those by names of parameters, only the values of this rank's stages."""
        checkpoint = request.checkpoint
        if not self._held or not is_by_name(checkpoint.names):
            return super().open(request)
        prepared = self.context.prepared
        weights = [self._read_weights(checkpoint, index) for index in range(len(prepared.models))]
        states = [self._read_state(checkpoint, index) for index in range(len(prepared.optimizers))]
        contents = FullStates(weights, states)
        return FullStatesLoad(request, prepared.optimizers, self, contents)

    def _read_weights(self, checkpoint: CheckpointFiles, index: int) -> dict[str, Any]:
        """A model's weights; those of other ranks without values, for their names and shapes."""
        stored = open_model_state(checkpoint.folder, index)
        held = self._held.get(self.unwrap(self.context.prepared.models[index]))
        names = {".".join(keys) for keys in stored.shapes}
        if held is not None:
            state_dict = held.model.state_dict()
            names = {
                *state_dict,
                *(held.layout.first_names[name] for name in state_dict if name in held.layout.first_names),
            }
        weights = {}
        for keys, shape in stored.shapes.items():
            name = ".".join(keys)
            weights[name] = stored.read_full(keys) if name in names else torch.empty(shape, device="meta")
        return weights | {".".join(keys): stored.read_object(keys) for keys in stored.objects}

    def _read_state(self, checkpoint: CheckpointFiles, index: int) -> dict[str, Any]:
        """The state of an optimizer; entries of this rank's parameters only."""
        stored = open_optimizer_state(checkpoint.folder, index)
        plain = _plain(self.context.prepared.optimizers[index])
        built = self.built_names(plain) or ()
        names = {name for held in self._held.values() for name in held.layout.own_parameters(held.model)}
        return read_full_optimizer_state(stored, plain, built, names)

    @override
    def forget(self) -> None:
        """Drop the stages, whose parameters would keep the models that they belong to."""
        super().forget()
        self._held.clear()
        self._optimizers.clear()
        self.inner.forget()


def _plain(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
