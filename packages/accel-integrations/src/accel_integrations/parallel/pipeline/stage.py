"""Running one stage of a model: the model's own forward, of which only this stage's modules compute.

Every rank runs the full forward of the model on the same batch, so that masks, positions and whatever else the code
between the modules computes are there on every stage. Modules of other stages compute nothing: the last block before a
stage returns what the stage before has sent, all others return placeholders full of NaN, which nothing may use. After
its last block the stage leaves the forward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel_integrations.parallel.pipeline.shapes import Structure, TensorShape, tensors_in
from accel_integrations.parallel.pipeline.split import ModelSplit
from accel_integrations.parallel.pipeline.stage_modules import PlaceholderModule, StageForward, reallocate

COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Options by which transformers models collect values from each of their blocks, on whatever stage."""


def check_nothing_is_collected(settings: Any, where: str) -> None:
    """Check that no outputs are collected from all blocks.

    Args:
        settings: Arguments of a forward, or a model's configuration as a dictionary.
        where: The name of the settings in the error message.

    Raises:
        ValueError: An option asks for such outputs.
    """
    for name in COLLECTED:
        if settings.get(name):
            raise ValueError(
                f"{name}={settings[name]!r} in {where} collects values from all blocks, but blocks are on different "
                "stages of the pipeline. Set it to False."
            )


class _StageEnd(BaseException):
    """Leaves the model's forward once the stage has run; not an error, so that no `except Exception` stops it."""


class StagedModel:
    """A model of which this rank holds some stages.

    Args:
        model: The model; modules of other stages are replaced in it.
        split: Where it is split.
        held: The stages of this rank.
        device: The device of this rank.
        forward: Runs the model; the model itself when None.
    """

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        held: Sequence[int],
        device: torch.device,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self._forward = model if forward is None else forward
        self.split = split
        self.held = tuple(held)
        self.device = device
        self.structures: dict[str, list[Structure]] = {}
        """What the modules of all stages return in each call, once measured for the current batch shapes."""
        self._stage_of = split.stages()
        self._stage: int | None = None  # the one that runs
        self._placeholder = math.nan
        self._recorded: dict[str, list[Structure]] | None = None
        for name, stage in self._stage_of.items():
            self._place(name, stage)

    def _place(self, name: str, stage: int) -> None:
        module = self.model.get_submodule(name)
        if stage in self.held:
            module.forward = StageForward(name, module.forward, self._call)
        else:
            parent, _, child = name.rpartition(".")
            self.model.get_submodule(parent).register_module(child, PlaceholderModule(name, module, self._call))

    def held_modules(self) -> list[nn.Module]:
        """The modules with parameters of this rank's stages, in order."""
        names = [name for name, stage in self._stage_of.items() if stage in self.held]
        modules = [self.model.get_submodule(name) for name in names]
        return [module for module in modules if next(module.parameters(), None) is not None]

    def release(self) -> None:
        """Free the memory of other stages' modules (they move to the meta device)."""
        for name, stage in self._stage_of.items():
            if stage not in self.held:
                module: Any = self.model.get_submodule(name)
                reallocate(module._original, "meta")

    def undo(self) -> None:
        """Restore the unsplit model; not possible after `release`."""
        for name, stage in self._stage_of.items():
            module: Any = self.model.get_submodule(name)
            if stage in self.held:
                module.forward = module.forward.__wrapped__
            else:
                parent, _, child = name.rpartition(".")
                self.model.get_submodule(parent).register_module(child, module._original)

    # ---- running ------------------------------------------------------------------------------------------------

    def run(
        self, stage: int, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Run one stage.

        Args:
            stage: The stage, one of `held`.
            received: The tensors that the stage before it returned.
            args: Arguments of the model, the same on all stages.
            kwargs: As above.

        Returns:
            The tensors of its last block's output, or those of the model's output for the last stage.
        """
        output = self._run(stage, received, args, kwargs)
        return tuple(tensor.contiguous() for tensor in tensors_in(output))

    def _run(self, stage: int, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._stage, self._received = stage, received
        self._calls: Counter[str] = Counter()
        self._result: Any = None
        self._is_through = False
        is_last = stage == self.split.num_stages - 1
        self._first_block = self.split.last_block(stage - 1) if stage else None
        self._last_block = None if is_last else self.split.last_block(stage)
        self._grad_mode = torch.is_grad_enabled()
        try:
            with _without_cache(getattr(self.model, "config", None)):
                output = self._forward(*args, **kwargs)
        except _StageEnd:
            return self._result
        finally:
            self._stage, self._received, self._result = None, (), None  # a graph that is kept keeps the model
        if is_last:
            return output
        raise RuntimeError(
            f"The forward of {type(self.model).__name__} ended without calling a module of stage {stage + 1}, which "
            f"begins with {self.split.split_points[stage]!r}. Set split_points to modules that every forward calls."
        )

    def _call(self, name: str, compute: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """Handle the call of a module of a stage; `compute` is its own forward, None when another rank holds it."""
        if self._stage is None:
            if compute is None:
                raise RuntimeError(
                    f"{name!r} is on another rank. Call the prepared model, which runs all stages, not one of its "
                    "submodules."
                )
            return compute(*args, **kwargs)  # recomputed by activation checkpointing
        stage = self._stage_of[name]
        if stage > self._stage:
            self._leave(name)
        number = self._calls[name]
        self._calls[name] += 1
        if stage < self._stage:
            return self._from_before(name, number)
        assert compute is not None
        self._check_grad_mode(name)
        output = compute(*args, **kwargs)
        if self._recorded is not None:
            self._recorded.setdefault(name, []).append(Structure.of(output))
        if name == self._last_block:
            self._result, self._is_through = output, True
        return output

    def _leave(self, name: str) -> None:
        if self._is_through:
            raise _StageEnd
        raise RuntimeError(
            f"{type(self.model).__name__} calls {name!r}, which belongs to a later stage, before {self._last_block!r} "
            "has ended: its modules are not called in the order in which they are registered. Register them in that "
            "order, or choose other split_points."
        )

    def _from_before(self, name: str, number: int) -> Any:
        structures = self.structures[name]
        if name == self._first_block:
            if number:
                raise RuntimeError(
                    f"{type(self.model).__name__} calls {name!r} more than once in a forward, so no stage can end with "
                    "it. Choose other split_points."
                )
            return structures[0].filled(self._received)
        if number >= len(structures):
            raise RuntimeError(
                f"{name!r} is called more often on later stages than on its own. A module must not be called again "
                "after modules of later stages, and the forward must call the same modules on all stages."
            )
        return structures[number].placeholder(self.device, self._placeholder)

    def _check_grad_mode(self, name: str) -> None:
        if self._grad_mode and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{name!r} runs without gradients inside a forward with them, as reentrant activation checkpointing "
                f"does. Pass gradient_checkpointing_kwargs={{'use_reentrant': False}}."
            )

    # ---- measuring ----------------------------------------------------------------------------------------------

    def measure(self, stage: int, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, list[Structure]]:
        """Measure what the modules of a held stage return; buffers and random states are not changed.

        The stages before it must be measured already.

        Returns:
            For each module, the structure of what it returned at each call; that of the model's output, for the last
            stage, under "".

        Raises:
            ValueError: When the stage computes with what modules of other stages return.
        """
        recorded: dict[str, list[Structure]] = {}
        self._recorded = recorded
        try:
            output = self._try(stage, args, kwargs)
            self._recorded = None
            if _has_nan(output):
                self._check_placeholders(stage, args, kwargs)
        finally:
            self._recorded = None
        if stage == self.split.num_stages - 1:
            recorded[""] = [Structure.of(output)]
        return recorded

    def _try(self, stage: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a stage on random inputs; buffers and random states are restored."""
        before = self.structures[self.split.last_block(stage - 1)][0].tensors if stage else []
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        devices = [] if self.device.type == "cpu" else [self.device]
        try:
            with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
                received = [_any_numbers(shape, self.device) for shape in before]
                return self._run(stage, received, args, kwargs)
        finally:
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    if name in buffers and buffer.shape == buffers[name].shape:
                        buffer.copy_(buffers[name])

    def _check_placeholders(self, stage: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Check whether NaN values come from placeholders, by running with other placeholders."""
        self._placeholder = 0.0
        try:
            is_used = not _has_nan(self._try(stage, args, kwargs))
        finally:
            self._placeholder = math.nan
        if is_used:
            raise ValueError(
                f"Stage {stage} of {type(self.model).__name__} computes with what modules of other stages return, not "
                "only with the output of the block before it: skip connections between blocks, and outputs that "
                "collect those of all blocks (such as output_hidden_states=True, or the auxiliary loss of experts), "
                "cannot cross stages. Switch such outputs off, or choose split_points that keep these modules together."
            )


@contextmanager
def _without_cache(config: Any) -> Iterator[None]:
    """Set `use_cache=False`, because the keys and values of other stages are on other ranks."""
    if not getattr(config, "use_cache", False):
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True


def _any_numbers(shape: TensorShape, device: torch.device) -> torch.Tensor:
    if not shape.dtype.is_floating_point:
        return torch.zeros(shape.shape, dtype=shape.dtype, device=device)
    numbers = torch.randn(shape.shape, device=device).to(shape.dtype)
    return numbers.requires_grad_() if shape.needs_grad and torch.is_grad_enabled() else numbers


def _has_nan(output: Any) -> bool:
    return any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in tensors_in(output))
