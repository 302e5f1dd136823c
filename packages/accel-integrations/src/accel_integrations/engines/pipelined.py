"""Pipelines: an engine around another one, under which every process trains consecutive parts of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from accel_integrations.engines.engine import Engine
from accel_integrations.parallel.module_states import broadcast_to_group
from accel_integrations.parallel.pipeline.gradients import GradientSync, clip_over_stages, sync_shared_parameters
from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_integrations.parallel.pipeline.layout import Layout, OptimizerLayout
from accel_integrations.parallel.pipeline.model import Pipeline, PipelinedModel
from accel_integrations.parallel.pipeline.split import split_model
from accel_integrations.parallel.pipeline.stage import StagedModel, check_nothing_is_collected
from accel_integrations.parallel.whole_state import load_whole_optimizer_state, whole_state_dict
from accel_integrations.prepared.prepared import Notes
from accel_state.enums import DynamoBackend

if TYPE_CHECKING:
    from accel_integrations.engines.fsdp2_model import Sharding
    from accel_integrations.precision.precision import Precision
    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_integrations.prepared.scheduler import AcceleratedScheduler
    from accel_state.settings.parallelism import PipelineParallelConfig


@dataclass(frozen=True)
class _Part:
    """What this process holds of one prepared model."""

    model: nn.Module
    layout: Layout
    exchange: GradientSync
    line: PipelineGroup

    @property
    def counted_elsewhere(self) -> set[int]:
        """Ids of parameters whose gradients another process counts in norms."""
        own = self.layout.own_parameters(self.model)
        shared = self.layout.shared_parameters(self.line)
        return {id(own[name]) for name, ranks in shared.items() if self.line.rank in ranks[1:]}


@final
class PipelinedEngine(Engine):
    """Cuts models into stages, and leaves the rest to another engine.

    The prepared model is called with the whole batch on every process of a pipeline and returns what the whole model
    would; its backward runs through the stages. What several stages or copies of the pipeline must agree on is
    exchanged once a window, before gradients are clipped or applied.

    Args:
        inner: The way in which each process trains its part.
    """

    name = "pipelined"

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        super().__init__(inner.context)
        config = self.context.state.parallelism_config
        assert config is not None
        self._config = config
        self._settings: PipelineParallelConfig = config.pp_handler  # type: ignore[assignment] # made with pp_size
        self._parts: Notes[nn.Module, _Part] = Notes()
        self._together: list[torch.optim.Optimizer] = []
        self._optimizers: Notes[Any, OptimizerLayout] = Notes()

    # ---- before anything starts ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what cannot be combined with pipelines.

        Raises:
            ValueError: Naming the settings in conflict and the allowed ones.
        """
        state, config, settings = self.context.state, self._config, self._settings
        others = [axis for axis in config.active_mesh_dims if axis not in ("pp", "dp_replicate", "dp_shard")]
        if others:
            raise ValueError(
                f"pp_size={config.pp_size} cannot be combined with {', '.join(others)}: combine pipelines with "
                "dp_replicate, or with dp_shard and FSDP 2."
            )
        self._check_sharding()
        if state.mixed_precision == "fp16":
            raise ValueError(
                f"mixed_precision='fp16' needs one loss scale for all of the pp_size={config.pp_size} stages, which see "
                "different gradients: choose 'bf16' or 'no'."
            )
        if state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                f"dynamo_backend={state.dynamo_plugin.backend.value!r} would compile the communication between stages: "
                "compile the blocks of the model with torch.compile before preparing it."
            )
        stages = config.pp_size * (settings.stages_per_rank or 1)
        count = settings.num_microbatches
        if count is not None and count < stages:
            raise ValueError(
                f"num_microbatches={count} would leave some of the {stages} stages idle all the time: choose at least "
                f"{stages}, or None for as many."
            )
        if count is not None and settings.schedule == "interleaved1f1b" and count % config.pp_size:
            raise ValueError(
                f"num_microbatches={count} with schedule='interleaved1f1b' must be a multiple of "
                f"pp_size={config.pp_size}."
            )
        if settings.broadcast_outputs and settings.schedule != "gpipe":
            raise ValueError(
                f"broadcast_outputs=True needs outputs to be kept, which schedule={settings.schedule!r} does not: choose "
                "schedule='gpipe'."
            )

    def _check_sharding(self) -> None:
        config, sharding = self._config, self._sharding
        if config.dp_shard_enabled and sharding is None:
            raise ValueError(
                f"pp_size={config.pp_size} with dp_shard_size={config.dp_shard_size} shards the parameters of each stage, "
                "which the FSDP engine of version 2 does: pass FullyShardedDataParallelPlugin(fsdp_version=2), or give "
                "these processes to dp_replicate_size."
            )
        if sharding is not None and (self._settings.stages_per_rank or 1) > 1:
            raise ValueError(
                f"stages_per_rank={self._settings.stages_per_rank} cannot be combined with "
                f"dp_shard_size={config.dp_shard_size}: choose schedule='1f1b' or 'gpipe'."
            )
        self.inner.check()

    @property
    def _sharding(self) -> Sharding | None:
        """How the inner engine divides parameters; None where it keeps them whole."""
        sharding: Sharding | None = getattr(self.inner, "sharding", None)
        return sharding

    def make_precision(self, wanted: str) -> Precision:
        """That of the inner engine."""
        return self.inner.precision

    # ---- preparing ----------------------------------------------------------------------------------------------

    def before_prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Note the optimizers: their models may come after them."""
        self._together = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
        return list(objects)

    def after_prepare(self, results: list[Any]) -> list[Any]:
        """Have optimizers made for full models forget what is on other ranks."""
        self._together = []
        for optimizer in self.context.prepared.optimizers:
            self._take_apart(optimizer.optimizer)
        return results

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Keep the stages of this process, on its device.

        Raises:
            ValueError: When the model cannot be cut as asked.
        """
        state = self.context.state
        mesh = self._config.axis_mesh("pp")
        assert mesh is not None
        line = PipelineGroup(mesh.get_group(), mesh.size() * (self._settings.stages_per_rank or 1), state.device)
        cut = split_model(model, line.num_stages, self._settings.split_points)
        layout = Layout.of(model, cut)
        config = getattr(model, "config", None)
        check_nothing_is_collected(vars(config) if hasattr(config, "__dict__") else {}, "the model's configuration")
        staged = StagedModel(model, cut, line.held, state.device)
        staged.release()
        model.register_load_state_dict_pre_hook(layout.complete_ties)
        if device_placement:
            model.to(state.device)
        shared, copies = layout.shared_parameters(line), self.averaging_group
        sync_shared_parameters(line, shared, layout.own_parameters(model))
        if copies is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                broadcast_to_group(tensor, copies)
        if self._sharding is not None:
            self._sharding.shard_each(staged.held_modules())
            layout.note_names(model)
        exchange = GradientSync(line, shared, layout.own_parameters(model), copies)
        pipeline = Pipeline(staged, line, self._settings, self._is_last_batch)
        pipeline.on_backward = exchange.note_backward
        self._parts[model] = _Part(model, layout, exchange, line)
        return PipelinedModel(model, pipeline)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, device_placement: bool) -> AcceleratedOptimizer:
        """Wrap an optimizer; one prepared by itself forgets at once what is elsewhere."""
        if not any(one is optimizer for one in self._together):
            self._take_apart(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler; it steps once for each batch, not for each process."""
        wrapped = super().prepare_scheduler(scheduler)
        if not wrapped.split_batches:
            wrapped._steps_per_call = self.data_place().count
        return wrapped

    def _is_last_batch(self) -> bool:
        return bool(self.gradient_state.end_of_dataloader)

    @property
    def _layouts(self) -> list[Layout]:
        models = (self.unwrap(model) for model in self.context.prepared.models)
        return [self._parts[model].layout for model in models if model in self._parts]

    @property
    def _line(self) -> PipelineGroup:
        return next(iter(self._parts.values())).line

    def _take_apart(self, optimizer: torch.optim.Optimizer) -> None:
        layouts = self._layouts
        if optimizer in self._optimizers or not layouts:
            return
        own = [parameter for part in self._parts.values() for parameter in part.model.parameters()]
        layout = OptimizerLayout(optimizer, layouts, self._line)
        layout.keep_own(optimizer, own, layouts)
        self._optimizers[optimizer] = layout

    # ---- stepping -----------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing is exchanged before a window ends, in any case."""
        return nullcontext()

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Exchange gradients, unless that was done, and take a step."""
        self._finish_gradients()
        return self.inner.step(optimizer, closure)

    def unscale_gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Unscale gradients, at the end of a window."""
        self._finish_gradients()
        self.inner.unscale_gradients(optimizers)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Scale gradients so that their joint norm over all stages is at most `max_norm`."""
        if not self._parts:
            return self.inner.clip_grad_norm_(parameters, max_norm, norm_type)
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        counted_elsewhere = {one for part in self._parts.values() for one in part.counted_elsewhere}
        return clip_over_stages(chosen, counted_elsewhere, max_norm, norm_type, self._line)

    def _finish_gradients(self) -> None:
        if self.gradient_state.sync_gradients:
            for part in self._parts.values():
                part.exchange.finish()

    @property
    def num_averaged(self) -> int:
        """As many as there are copies of the pipeline."""
        return self._config.data_parallel_size

    # ---- storing ------------------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole model's tensors on every process; all must call this."""
        inner = self.unwrap(model)
        part = self._parts.get(inner)
        if part is None:
            return self.inner.full_state_dict(model)
        return part.layout.full_state_dict(whole_state_dict(inner.state_dict()), self._line)

    def full_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state dict that the optimizer of the whole model would have, on every process; all must call this."""
        plain = _plain(optimizer)
        layout = self._optimizers.get(plain)
        return optimizer.state_dict() if layout is None else layout.whole_state(plain, self._layouts)

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Restore what `full_optimizer_state` returned, here or in a run of another size."""
        load_whole_optimizer_state(optimizer, self.own_optimizer_state(optimizer, state))

    def own_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The state of the parameters in this rank's stages."""
        plain = _plain(optimizer)
        layout = self._optimizers.get(plain)
        return state if layout is None else layout.own_part(state, plain, self._layouts)


def _plain(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
