"""From what a user built to what trains on this machine: models, optimizers, schedulers and data loaders."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_data.prepare import prepare_data_loader
from accel_integrations.parallel.transform import make_transforms
from accel_integrations.prepared.parameters import ReplacedParameters
from accel_integrations.prepared.prepared import PREPARED_MARK
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_integrations.unwrap import extract_model_from_parallel
from accel_state.environment import str_to_bool
from accel_state.libraries import is_bitsandbytes_multi_backend_available, is_xpu_available

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_integrations.parallel.transform import Transform
    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accel_integrations.prepared.prepared import Prepared
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.settings.data import DataLoaderConfiguration

SCHEDULERS = (LRScheduler, AcceleratedScheduler)


class PreparesEach(Protocol):
    """What prepares objects of one kind each: the accelerator, whose methods a subclass may have overridden."""

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model is spread over several devices."""

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None) -> nn.Module:
        """Prepare a model."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer."""

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler."""

    def prepare_data_loader(self, data_loader: DataLoader[Any], device_placement: bool | None = None) -> Any:
        """Prepare a data loader."""


class Preparer:
    """Prepares objects for the engine and keeps a record of them.

    Args:
        engine: The way of training.
        state: Processes, devices and precision of the run.
        prepared: Where the record is kept.
        loader_settings: How data loaders share out their batches.
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
        self.replaced = ReplacedParameters()
        self.transforms: Sequence[Transform] = (
            make_transforms(state.parallelism_config) if engine.accepts_transforms else ()
        )

    def prepare(
        self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None, each: PreparesEach
    ) -> Any:
        """Prepare any number of objects together; see `Accelerator.prepare`."""
        placement = _check_placement(device_placement, objects)
        for item in objects:
            if isinstance(item, nn.Module):
                self.check_device_map(item, each)

        def prepare_each(items: Sequence[Any]) -> list[Any]:
            results = list(items)
            for late in (False, True):  # schedulers last: they look for their prepared optimizers
                for index, item in enumerate(items):
                    if isinstance(item, SCHEDULERS) is late:
                        results[index] = _prepare_one(item, placement[index], each)
            return results

        results = self.engine.prepare(objects, prepare_each)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None,
        evaluation: bool,
        each: PreparesEach,
        shard: Callable[[nn.Module], nn.Module] | None = None,
    ) -> nn.Module:
        """The order of the steps from a plain model to one that trains here.

        Args:
            model: The model.
            device_placement: Whether it is moved to the device; None for the usual.
            evaluation: Whether it will not be trained.
            each: Says whether the model is spread over devices.
            shard: Does the engine's work before it; then nothing is left for the engine to shard.
        """
        _check_type("prepare_model", model, nn.Module)
        known = _find(self.prepared.wrapped, model, _inner_model)
        if known is not None:
            return known
        if getattr(model, PREPARED_MARK, False):
            return self._keep_model(model)
        self.check_device_map(model, each)
        place = self._placed(device_placement) and not is_dispatched(model)

        mesh: Any = self.state.device_mesh  # there is one where there are transforms
        for transform in self.transforms:
            transform.check(model, mesh)
        with self.replaced.recording(model):
            for transform in self.transforms:  # tensor, context, sequence: what runs inside of the forward
                model = transform.apply(model, mesh)
            model = self.engine.precision.convert(model)
            model = self.engine.precision.wrap_forward(model)
            if shard is not None:
                model = shard(model)
            model = self.engine.prepare_model(model, evaluation=evaluation, device_placement=place)
        for optimizer in self.prepared.optimizers:
            self.replaced.rebind(optimizer)
        model = self.engine.compile_model(model, self.state.dynamo_plugin)
        return self._keep_model(model)

    def _keep_model(self, model: nn.Module) -> nn.Module:
        self.prepared.models.append(_inner_model(model))
        return _keep(self.prepared.wrapped, model)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer once."""
        _check_type("prepare_optimizer", optimizer, torch.optim.Optimizer)
        known = _find(self.prepared.optimizers, optimizer, lambda known: known.optimizer)
        if known is not None:
            return known
        self.replaced.rebind(optimizer)
        if not getattr(optimizer, PREPARED_MARK, False):
            optimizer = self.engine.prepare_optimizer(optimizer, device_placement=self._placed(device_placement))
        return _keep(self.prepared.optimizers, optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler once."""
        known = _find(self.prepared.schedulers, scheduler, lambda known: known.scheduler)
        if known is not None:
            return known
        if not getattr(scheduler, PREPARED_MARK, False):
            scheduler = self.engine.prepare_scheduler(scheduler)
        return _keep(self.prepared.schedulers, scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None,
        slice_fn_for_dispatch: Callable[..., Any] | None,
    ) -> Any:
        """Make a data loader read this process's share."""
        if not getattr(data_loader, PREPARED_MARK, False):
            _check_type("prepare_data_loader", data_loader, DataLoader)
            place, settings = self.engine.data_place(), self.loader_settings
            data_loader = prepare_data_loader(
                data_loader,
                self.state.device,
                num_processes=place.count,
                process_index=place.index,
                split_batches=settings.split_batches,
                put_on_device=self._placed(device_placement),
                rng_types=list(self.rng_types),
                dispatch_batches=settings.dispatch_batches,
                even_batches=settings.even_batches,
                slice_fn_for_dispatch=slice_fn_for_dispatch,
                use_seedable_sampler=settings.use_seedable_sampler,
                data_seed=settings.data_seed,
                non_blocking=settings.non_blocking,
                use_stateful_dataloader=settings.use_stateful_dataloader,
                torch_device_mesh=self.state.device_mesh,
            )
            data_loader = self._cut_sequences(self.engine.finish_loader(data_loader))
        return _keep(self.prepared.dataloaders, data_loader)

    def _cut_sequences(self, data_loader: Any) -> Any:
        """Have a loader hand out this process's part of sequences, where processes trade them for heads."""
        config = self.state.parallelism_config
        if config is not None and config.sp_enabled and self.state.device_mesh is not None:
            from accel_data.sequence_shard import SequenceShard

            data_loader.sequence_shard = SequenceShard(self.state.device_mesh.get_local_rank("sp"), config.sp_size)
        return data_loader

    def check_device_map(self, model: nn.Module, each: PreparesEach) -> None:
        """Refuse to train, on several processes, a model whose layers were put on several devices.

        Raises:
            ValueError: Naming the devices.
        """
        check_quantized(model)
        if self.state.num_processes == 1 or not each.verify_device_map(model):
            return
        if not str_to_bool(os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP", "false")):
            raise ValueError(
                f"{type(model).__name__} was loaded with a device_map that spreads it over several devices, which "
                f"cannot be trained on {self.state.num_processes} processes: launch one process, or load the model "
                "without device_map (set ACCELERATE_BYPASS_DEVICE_MAP=true if you know that it fits)."
            )

    def _placed(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement


def check_quantized(model: nn.Module) -> None:
    """Refuse to train a model of 8-bit or 4-bit layers whose parts wait where these cannot compute.

    Raises:
        ValueError: Naming the places.
    """
    bits = next((bits for bits in (8, 4) if getattr(model, f"is_loaded_in_{bits}bit", False)), None)
    elsewhere = sorted({"cpu", "disk"} & {str(place) for place in getattr(model, "hf_device_map", {}).values()})
    if bits and elsewhere and not (is_bitsandbytes_multi_backend_available() or is_xpu_available()):
        raise ValueError(
            f"{type(model).__name__} was loaded in {bits} bits with parts of it on {' and '.join(elsewhere)}, and cannot be "
            "trained with CPU or disk offload: load all of it on the device on which you train, for example with "
            'device_map={"": torch.cuda.current_device()}.'
        )


def is_dispatched(model: nn.Module) -> bool:
    """Whether `device_map` spread the model, or a part of it, over several devices."""
    return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())


def _prepare_one(item: Any, placement: bool | None, each: PreparesEach) -> Any:
    if isinstance(item, DataLoader):
        return each.prepare_data_loader(item, device_placement=placement)
    if isinstance(item, nn.Module):
        return each.prepare_model(item, device_placement=placement)
    if isinstance(item, torch.optim.Optimizer):
        return each.prepare_optimizer(item, device_placement=placement)
    if isinstance(item, SCHEDULERS):
        return each.prepare_scheduler(item)
    return item  # nothing to prepare: comes back as it is


def _check_placement(placement: Sequence[bool | None] | None, objects: Sequence[Any]) -> Sequence[bool | None]:
    if placement is None:
        return [None] * len(objects)
    if len(placement) != len(objects):
        raise ValueError(
            f"device_placement={placement!r} has {len(placement)} entries for {len(objects)} objects: give one for "
            "each, None for the accelerator's own setting."
        )
    return placement


def _check_type(method: str, item: Any, wanted: type) -> None:
    if not isinstance(item, wanted):
        raise TypeError(
            f"{method}() got {shorten(item)} of type {type(item).__name__}: pass an object of {wanted.__qualname__}."
        )


def _inner_model(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


def _find(record: list[Any], item: Any, inner: Callable[[Any], Any]) -> Any:
    """The recorded object that is `item`, or was made from it."""
    for known in record:
        if known is item or inner(known) is item:
            return known
    return None


def _keep(record: list[Any], item: Any) -> Any:
    """Mark an object as prepared and record it once."""
    setattr(item, PREPARED_MARK, True)
    if _find(record, item, lambda known: known) is None:
        record.append(item)
    return item
