"""Warnings about training that runs, but not as it was meant: each is given once, at a run's first backward pass or step."""

from __future__ import annotations

import gc
import json
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle

from accel_integrations.prepared.prepared import Notes
from accel_ops.collectives.store_gather import FirstNote
from accel_state.gradient_state import GradientState
from accel_state.processes import PartialState
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_integrations.engines.engine import Engine
    from accel_integrations.prepared.optimizer import AcceleratedOptimizer
    from accelerate.interface import AcceleratorInterface

NUM_COMPARED = 4096
"""So many elements of each input of a model are compared."""
NUM_WATCHED = 3
"""Up to this backward pass, steps of optimizers that were not prepared are looked at: of each of two that take turns, say."""
_latest: weakref.ref[AcceleratorInterface] | None = None


def check_loss(loss: object) -> None:
    """Check that a loss has a backward pass.

    Raises:
        TypeError: It is a number, for instance.
    """
    if not hasattr(loss, "backward"):
        raise TypeError(
            f"backward() takes the loss as a tensor, got {loss!r} ({type(loss).__name__}), which has no gradients. Pass the "
            "tensor itself, without .item() or float()."
        )


def warn_of_unchanged(item: object) -> None:
    """Warn of an object that `prepare` returns as it is, although it looks as if it was meant to be prepared."""
    if isinstance(item, Dataset):
        warn_user(
            f"prepare() returned a {type(item).__name__} as it is: datasets are not prepared, so each process reads all of "
            "it. Pass DataLoader(dataset, batch_size=...)."
        )
    elif isinstance(item, list | tuple | dict):
        parts = item.values() if isinstance(item, dict) else item
        kinds = [type(part).__name__ for part in parts if isinstance(part, nn.Module | Optimizer | DataLoader)]
        if kinds:
            warn_user(
                f"prepare() returned a {type(item).__name__} with {', '.join(kinds)} as it is: what is in it was not prepared. "
                "Pass the objects one by one: prepare(model, optimizer)."
            )


class ForwardNote:
    """A forward pre-hook of a prepared model that notes its first call, and is gone then.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.was_called = False
        self._note = FirstNote("inputs")
        self._gradients = FirstNote("gradients")
        self._checksum: int | None = None  # of the inputs, in training
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, inputs: Any, kwargs: Any) -> None:
        """Note the call."""
        self.was_called = True
        if torch.compiler.is_compiling():  # a handle in the graph would break it
            return
        self._handle.remove()
        if model.training and torch.is_grad_enabled() and not GradientState().in_dataloader:
            read = [tensor.detach().flatten()[:NUM_COMPARED].tolist() for tensor in tensors_in((inputs, kwargs))]
            self._checksum = zlib.crc32(repr(read).encode()) if read else None

    def compare(self, shard: int) -> None:
        """Warn if the rank that came first had the same inputs, though its shard of the data is another; nothing waits.

        Args:
            shard: The index of the shard of the data that this rank reads.
        """
        if self._checksum is None or GradientState().in_dataloader:
            return
        first = self._note.leave(json.dumps([shard, self._checksum]))
        if first is None:
            return
        other_shard, checksum = json.loads(first)
        is_same = shard != other_shard and self._checksum == checksum
        if is_same and any(issubclass(type(item), DataLoader) for item in gc.get_objects()):  # and no made-up batch
            warn_user(
                "Processes train on the same batch, and no prepared data loader is iterated: each reads all samples. Loop over "
                "the one that prepare() returns: loader = accelerator.prepare(loader)."
            )

    def has_other_gradients(self, weights: list[nn.Parameter]) -> bool:
        """Whether the rank that came first has other gradients, which were not averaged then; nothing waits."""
        sums = torch.stack([weight.grad.detach().float().sum() for weight in weights if weight.grad is not None])
        mine = json.dumps(sums.tolist())
        return self._gradients.leave(mine) not in (None, mine)


class FirstStepCheck:
    """Looks at what was prepared when gradients are first computed and first applied, and then no more.

    Only where the engine replicates models: sharding engines give optimizers other parameters.

    Args:
        engine: The training engine, whose context has the record of prepared objects.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_backward = 0
        self._watched: Notes[Any, bool] = Notes()
        self._forwards: Notes[nn.Module, ForwardNote] = Notes()
        self._unprepared: UnpreparedOptimizers | None = None

    @property
    def has_gone_backward(self) -> bool:
        """Whether `accelerator.backward` was called."""
        return self._num_backward > 0

    @property
    def is_watching(self) -> bool:
        """Whether `before_backward` wants to be called before the next backward pass."""
        return self._unprepared is not None

    def forget(self) -> None:
        """Begin anew: what was prepared is gone."""
        self._num_backward = 0

    def before_backward(self) -> None:
        """Look at the run before the first backward passes, and at optimizers that step between them."""
        self._num_backward += 1
        if self._num_backward == 1:
            self._warn_of_unprepared_models()
            for note in self._forwards.values():
                note.compare(self._engine.data_shard().index)
            if self._engine.steps_torch_optimizers:
                self._unprepared = UnpreparedOptimizers(self._engine, self._warn_of_forward_passes_aside)
        elif self._num_backward == NUM_WATCHED and self._unprepared is not None:
            self._unprepared.close()
            self._unprepared = None

    def _warn_of_unprepared_models(self) -> None:
        world, prepared = PartialState().num_processes, self._engine.context.prepared
        if not self._engine.accumulates_in_grad:
            return
        if world > 1 and not prepared.models:
            warn_user(
                f"backward() is called on {world} processes, but no model was prepared: gradients are not averaged, and each "
                "process trains a model of its own. Call `model = accelerator.prepare(model)` first."
            )

    def watch_model(self, model: nn.Module) -> None:
        """Look whether the forward pass of a prepared model is called, which all-reduces its gradients."""
        replica = getattr(model, "_orig_mod", model)  # inside what `torch.compile` made of it
        if isinstance(replica, nn.parallel.DistributedDataParallel) and replica not in self._forwards:
            self._forwards[replica] = ForwardNote(replica)

    def watch(self, optimizer: AcceleratedOptimizer) -> None:
        """Look at a prepared optimizer when it takes its first step.

        Not through a hook of torch's: one that removes itself breaks the step of a program that has hooks of its own.
        """
        if not self._engine.accumulates_in_grad or optimizer.optimizer in self._watched:
            return
        self._watched[optimizer.optimizer] = True
        check = weakref.ref(self)  # programs may step optimizers after they have let go of the accelerator
        watched, before = weakref.ref(optimizer), optimizer._before_step

        def first_step() -> None:
            stepping, checking = watched(), check()
            if stepping is not None:
                stepping._before_step = before
                if checking is not None:
                    checking._before_first_step(stepping.optimizer)
            if before is not None:
                before()

        optimizer._before_step = first_step

    def _before_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        num_steps = self._engine.gradient_state.num_steps
        if num_steps > 1 and not self.has_gone_backward:
            warn_user(
                f"An optimizer steps, but accelerator.backward() was never called: gradients of {num_steps} micro-batches are "
                "summed, not averaged. Call accelerator.backward(loss) instead of loss.backward()."
            )
        self._warn_of_forward_passes_aside(optimizer)
        world, models = PartialState().num_processes, self._engine.context.prepared.models
        held = {id(parameter) for model in models for parameter in model.parameters()}
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strangers = [parameter for parameter in updated if id(parameter) not in held]
        if len(strangers) < len(updated):  # without a gradient, some are only not trained
            strangers = [parameter for parameter in strangers if parameter.grad is not None]
        if strangers and models and (world > 1 or len(strangers) == len(updated)):
            shapes = ", ".join(str(list(parameter.shape)) for parameter in strangers[:3])
            effect = "not averaged over processes, and not" if world > 1 else "not"
            warn_user(
                f"{type(optimizer).__name__} updates {len(strangers)} of {len(updated)} parameters that no prepared model holds (of shape "
                f"{shapes}{', ...' if len(strangers) > 3 else ''}): their gradients are {effect} in checkpoints. Make the "
                "optimizer from the parameters of the model that you pass to prepare()."
            )

    def _warn_of_forward_passes_aside(self, optimizer: torch.optim.Optimizer) -> None:
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for replica, note in list(self._forwards.items()):
            trained = [weight for weight in replica.parameters() if id(weight) in updated and weight.grad is not None]
            if not trained or note.was_called:
                continue
            del self._forwards[replica]  # it is said once
            if note.has_other_gradients(trained):  # replica.forward(batch) was not noted, and averages them
                warn_user(
                    f"{type(optimizer).__name__} steps with gradients that were not averaged over processes, so that the replicas diverge: "
                    f"the prepared {type(replica.module).__name__} was never called, only something inside it, such as the model from "
                    "before prepare() or a method of unwrap_model(model). Call what prepare() returned: model, optimizer, loader = "
                    "accelerator.prepare(model, optimizer, loader); let its forward() call the method."
                )


_hooks_of_collected: list[RemovableHandle] = []
"""The hooks of watches whose accelerators were collected."""


class UnpreparedOptimizers:
    """Looks at the first step of each optimizer that was not prepared: whether it uses the gradients of prepared models wrongly.

    One that steps at sync steps only, without a loss scale, is right.

    Args:
        engine: The training engine, whose context has the record of prepared objects.
        check_forward: Warns if a stepping optimizer has gradients of a model that was called aside.
    """

    def __init__(self, engine: Engine, check_forward: Callable[[torch.optim.Optimizer], None]) -> None:
        self._check_forward = weakref.WeakMethod(check_forward)
        self._seen: Notes[Any, bool] = Notes()
        watched = weakref.ref(self)
        self._engine = weakref.ref(engine)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            check = watched()
            if check is not None and optimizer not in check._seen:
                check._seen[optimizer] = True
                with suppress(
                    AttributeError, KeyError, TypeError
                ):  # a prepared one that is no optimizer of torch's inside
                    check._look_at(optimizer)

        # An accelerator may be collected while torch iterates over the hooks of a step, which must not lose one then: its hook
        # does nothing from then on, and the next watch removes it.
        while _hooks_of_collected:
            _hooks_of_collected.pop().remove()
        self._hook = register_optimizer_step_pre_hook(before_step)
        self._finalizer = weakref.finalize(self, _hooks_of_collected.append, self._hook)

    def close(self) -> None:
        """Look no more; not to be called by a hook of a step."""
        self._finalizer.detach()
        self._hook.remove()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a run watches anew

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        engine = self._engine()
        if engine is None or not engine.context.prepared.models:
            return
        prepared = engine.context.prepared
        stepped = {id(parameter) for each in prepared.optimizers for parameter in _parameters(each)}
        updated = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
        check_forward = self._check_forward()
        if check_forward is not None:
            check_forward(optimizer)
        if not updated or any(id(parameter) in stepped for parameter in updated):  # inside of a prepared one
            return
        held = {id(parameter) for model in prepared.models for parameter in model.parameters()}
        name, remedy = type(optimizer).__name__, "Pass it to prepare(), together with its model."
        if not any(id(parameter) in held for parameter in updated):
            if all(parameter.grad is None for parameter in updated):
                warn_user(
                    f"{name} was not prepared, and none of its parameters has a gradient or is in a prepared model, so that it trains "
                    f"nothing: it was made from another copy of the model, or before the model was prepared. {remedy}"
                )
        elif engine.precision.scaler is not None:
            warn_user(
                f"{name} was not prepared, and steps with gradients that are multiplied by the loss scale of "
                f"mixed_precision={engine.context.state.mixed_precision!r}. {remedy}"
            )
        elif not engine.gradient_state.sync_gradients:
            warn_user(
                f"{name} was not prepared, and steps in every micro-batch, not only at the end of each {engine.gradient_state.num_steps}: "
                f"with gradients that are not complete, on several processes not averaged either. {remedy}"
            )


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_in(part)


def accumulation_before() -> int | None:
    """The micro-batches of a window that an earlier accelerator has set; None where there is none."""
    shared = GradientState._shared_state
    return GradientState().num_steps if "plugin_kwargs" in shared else None


def warn_of_other_accumulation(accelerator: AcceleratorInterface, before: int | None) -> None:
    """Warn if an accelerator changes the accumulation of an earlier one that is in use: all share one state.

    Args:
        accelerator: The new one.
        before: What `accumulation_before` returned before it was made.
    """
    global _latest
    earlier, _latest = None if _latest is None else _latest(), weakref.ref(accelerator)
    now = accelerator.engine.gradient_state.num_steps
    if earlier is not None and earlier._models and before not in (None, now):
        warn_user(
            f"This Accelerator sets gradient_accumulation_steps={now} for all, and the one before, which has prepared models, "
            f"had {before}. Use one Accelerator, or pass gradient_accumulation_steps={before} again."
        )
