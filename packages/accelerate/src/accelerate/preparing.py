"""Preparing models, optimizers, schedulers and data loaders for the engine and the device mesh of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_integrations.engines.registry import note_engine
from accel_integrations.parallel.transform import make_transforms
from accel_integrations.prepared.parameters import ReplacedParameters
from accel_integrations.prepared.prepared import find, is_prepared, keep
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_integrations.unwrap import extract_model_from_parallel
from accelerate.device_maps import is_dispatched, is_loaded_by_map

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_integrations.parallel.transform import Transform
    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_integrations.prepared.prepared import Prepared
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.mesh_axes import DataShard
    from accel_state.settings.data import DataLoaderConfiguration
    from accelerate.finite_gradients import FiniteGradients

SCHEDULERS = (LRScheduler, AcceleratedScheduler)


KINDS: tuple[tuple[Any, str], ...] = (
    (DataLoader, "prepare_data_loader"),
    (nn.Module, "prepare_model"),
    (torch.optim.Optimizer, "prepare_optimizer"),
    (SCHEDULERS, "prepare_scheduler"),
)
"""Which method of an accelerator prepares an object of which class; the first match applies."""


class Preparer:
    """Prepares objects for the engine and keeps a record of them.

    Args:
        engine: The training engine.
        state: Processes, devices and precision of the run.
        prepared: The record of prepared objects.
        loader_settings: How data loaders shard their data over the ranks.
        rng_types: Random generators that data loaders synchronise at the start of an epoch.
        device_placement: Whether objects are moved to the device unless a call says otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        state: AcceleratorState,
        prepared: Prepared,
        *,
        loader_settings: DataLoaderConfiguration,
        rng_types: Sequence[Any],
        device_placement: bool,
    ) -> None:
        self.engine = engine
        self.state = state
        self.prepared = prepared
        self.loader_settings = loader_settings
        self.rng_types = rng_types
        self.device_placement = device_placement
        self.after_batch: Callable[[], None] | None = None  # for prepared loaders
        self.finite_gradients: FiniteGradients | None = None
        self.replaced = ReplacedParameters()
        self.transforms: Sequence[Transform] = (
            make_transforms(state.parallelism_config) if engine.accepts_transforms else ()
        )

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None,
        evaluation: bool,
        shard: Callable[[nn.Module], nn.Module] | None = None,
    ) -> nn.Module:
        """Prepare a plain model: the order of all steps.

        Args:
            model: The model.
            device_placement: Whether it is moved to the device; None for the accelerator's own setting.
            evaluation: Whether it will not be trained.
            shard: Shards the model before the engine does; then nothing is left for the engine to shard.
        """
        wrapper = self.prepared_model(model)
        if wrapper is not None:
            return wrapper
        on_device = self._placed(device_placement) and not is_dispatched(model) and not is_loaded_by_map(model)

        # All checks come before the first change: a model that is refused is still the one that the program built.
        self.engine.check_model(model)
        mesh: Any = self.state.device_mesh  # there is one where there are transforms
        for transform in self.transforms:
            transform.check(model, mesh)
        with self.replaced.recording(model):
            # From the inside out. Tensor, context and sequence parallelism change the layers themselves; layers are then
            # converted (FP8) as they will be computed; the engine comes last, because it takes parameters as they are.
            for transform in self.transforms:
                model = transform.apply(model, mesh)
            model = self.engine.precision.convert(model)
            model = self.engine.precision.wrap_forward(model)
            if shard is not None:
                model = shard(model)
            model = self.engine.prepare_model(model, evaluation=evaluation, device_placement=on_device)
        # Parameters may be new objects by now, and an optimizer that was prepared before holds the old ones.
        for optimizer in self.prepared.optimizers:
            self.replaced.rebind(optimizer)
        # The compiler must see the hooks and wrappers of the engine, or it would trace around their collectives.
        model = self.engine.compile_model(model, self.state.dynamo_plugin)
        model = self._keep_model(model)
        for optimizer in self.prepared.optimizers:
            self._check_sharded(optimizer.optimizer)
        return model

    def prepared_model(self, model: nn.Module) -> nn.Module | None:
        """The prepared model, if this or another accelerator has prepared it; None if it has not.

        Raises:
            TypeError: It is not a module.
        """
        _check_type("prepare_model", model, nn.Module)
        wrapper: nn.Module | None = find(self.prepared.wrapped, model, _inner_model)
        return wrapper if wrapper is not None or not is_prepared(model) else self._keep_model(model)

    def _keep_model(self, model: nn.Module) -> nn.Module:
        note_engine(model, self.engine)
        wrapper: nn.Module = self.prepared.keep_model(_inner_model(model), model)
        return wrapper

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer once."""
        _check_type("prepare_optimizer", optimizer, torch.optim.Optimizer)
        wrapper = find(self.prepared.optimizers, optimizer, lambda wrapper: wrapper.optimizer)
        if wrapper is not None:
            return wrapper
        # The model may have been prepared before its optimizer, which was made for parameters that are gone since.
        self.replaced.rebind(optimizer)
        if not is_prepared(optimizer):
            optimizer = self.engine.prepare_optimizer(optimizer, device_placement=self._placed(device_placement))
            self._check_sharded(optimizer.optimizer)
            if self.finite_gradients is not None:
                self.finite_gradients.watch(optimizer)
        return keep(self.prepared.optimizers, optimizer)

    def _check_sharded(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.engine.steps_torch_optimizers:
            return
        from accel_integrations.prepared.whole_parameters import check_sharded_parameters

        is_flat = self.engine.flattens_parameters_of(optimizer)
        check_sharded_parameters(optimizer, is_flat, f"the engine {self.engine.name!r}")

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler once."""
        wrapper = find(self.prepared.schedulers, scheduler, lambda wrapper: wrapper.scheduler)
        if wrapper is not None:
            return wrapper
        if not is_prepared(scheduler):
            scheduler = self.engine.prepare_scheduler(scheduler)
        return keep(self.prepared.schedulers, scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None,
        slice_fn_for_dispatch: Callable[..., Any] | None,
        shard: DataShard | None = None,
    ) -> Any:
        """Make a data loader yield this rank's shard of the data, or the one that `shard` says."""
        if not is_prepared(data_loader):
            from accel_data.prepare import prepare_data_loader

            _check_type("prepare_data_loader", data_loader, DataLoader)
            shard, settings = shard or self.engine.data_shard(), self.loader_settings
            dispatches = settings.dispatch_batches if self.engine.dispatches_streams else False
            data_loader = prepare_data_loader(
                self.engine.start_loader(data_loader, settings),
                self.state.device,
                num_processes=shard.count,
                process_index=shard.index,
                split_batches=settings.split_batches,
                put_on_device=self._placed(device_placement),
                rng_types=list(self.rng_types),
                dispatch_batches=dispatches,
                even_batches=settings.even_batches,
                slice_fn_for_dispatch=slice_fn_for_dispatch,
                use_seedable_sampler=settings.use_seedable_sampler,
                data_seed=settings.data_seed,
                non_blocking=settings.non_blocking,
                use_stateful_dataloader=settings.use_stateful_dataloader,
                torch_device_mesh=self.state.device_mesh,
                already_sharded=settings.already_sharded,
            )
            # The engine wraps last: sequence shards are cut from the batches that this rank was given.
            data_loader = self.engine.finish_loader(data_loader)
            if self.after_batch is not None:
                data_loader.after_batch = self.after_batch
        return keep(self.prepared.dataloaders, data_loader)

    def _placed(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement


def in_order(objects: Sequence[Any]) -> list[int]:
    """Positions in the order of preparation: schedulers last, because they look for their prepared optimizers."""
    return sorted(range(len(objects)), key=lambda index: isinstance(objects[index], SCHEDULERS))


def method_for(item: Any) -> str | None:
    """The method of an accelerator that prepares an object; None for one that is returned unchanged."""
    return next((method for kind, method in KINDS if isinstance(item, kind)), None)


def check_placement(placement: Sequence[bool | None] | None, objects: Sequence[Any]) -> Sequence[bool | None]:
    """The device placement of each object.

    Raises:
        ValueError: There are not as many entries as objects.
    """
    if placement is None:
        return [None] * len(objects)
    if len(placement) != len(objects):
        raise ValueError(
            f"device_placement={placement!r} has {len(placement)} entries for {len(objects)} objects. Pass one for "
            "each, None for the accelerator's own setting."
        )
    return placement


def _check_type(method: str, item: Any, expected_type: type) -> None:
    if not isinstance(item, expected_type):
        raise TypeError(
            f"{method}() got {shorten(item)} of type {type(item).__name__}. Pass an object of {expected_type.__qualname__}."
        )


def _inner_model(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)
