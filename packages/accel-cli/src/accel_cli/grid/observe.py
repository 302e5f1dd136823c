"""Runs a script as one rank of a configuration, and records the loss, the gradient norm and the update of its first steps.

A run of `python -m accel_cli.grid.observe OBSERVATION SCRIPT ...`, which `accelerate launch` starts on each rank.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any

import torch

BATCH_MULTIPLE = 12  # which 1, 2, 3 and 4 ranks can share
ENGINE_ARGUMENTS = (
    "fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config", "deepspeed_plugins", "engine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Observation:
    """The settings of `accel_cli.grid.observe`, which reads them as JSON. The defaults are those of the grid.

    Attributes:
        folder: For the records of the ranks.
        num_steps: After how many optimizer steps the script ends.
        batch_size: Of all ranks together; None rounds the script's own up to a multiple of `BATCH_MULTIPLE`.
        arguments: For `Accelerator`, in the place of the script's own.
        left_out: Arguments of the script's `Accelerator` that do not count.
        is_module: Whether the script is the name of a module.
    """

    folder: str
    num_steps: int = 4
    batch_size: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"mixed_precision": "no", "cpu": True})
    left_out: tuple[str, ...] = ENGINE_ARGUMENTS
    is_module: bool = False

    def global_batch_size(self, own: int) -> int:
        """The batch size of all ranks together, for a loader whose own is given."""
        return self.batch_size or -(-own // BATCH_MULTIPLE) * BATCH_MULTIPLE


EPS = 1e-3


class EndOfRun(BaseException):
    """The script has taken all steps that are compared; not an error that a script may catch."""


class Observer:
    """Records the first optimizer steps of this rank.

    Attributes:
        observation: What is recorded and changed.
        steps: One entry for each step that was taken.
        updates: By how much each step changed every entry of the full state dict; on the main process alone.
        facts: What other configurations or the report need to know about the script.
    """

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.steps: list[dict[str, Any]] = []
        self.updates: list[dict[str, torch.Tensor]] = []
        self.facts: dict[str, Any] = {"began": False, "has_blocks": False, "num_steps": 1, "max_norm": 0.0}
        self.parameters: dict[str, torch.Tensor] = {}
        """The full state dict after the last step."""
        self._accelerator: Any = None
        self._losses: list[tuple[float, float]] = []
        self._norms: list[float] = []

    def install(self) -> None:
        """Wrap the methods that a training loop calls."""
        accelerator: Any = import_module("accelerate.accelerator").Accelerator
        wrappers = import_module("accel_integrations.engines.deepspeed.wrappers")
        optimizers = [import_module("accel_integrations.prepared.optimizer").AcceleratedOptimizer]
        for owner, name, observed in (
            (accelerator, "__init__", self._init),
            (accelerator, "prepare", self._prepare),
            (accelerator, "prepare_model", self._prepare),
            (accelerator, "prepare_optimizer", self._prepare),
            (accelerator, "prepare_data_loader", self._prepare),
            (accelerator, "backward", self._backward),
            (accelerator, "clip_grad_norm_", self._clip),
            (accelerator, "maybe_context_parallel", self._block),
            (optimizers[0], "step", self._step),
            (wrappers.DeepSpeedOptimizerWrapper, "step", self._step),
        ):
            _wrap(owner, name, observed)

    # ---- making runs comparable -----------------------------------------------------------------------------------

    def _init(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        """Train in float32, with the engine and the mesh of the configuration; batches are global ones."""
        options = {name: value for name, value in kwargs.items() if name not in self.observation.left_out}
        if options.get("fsdp_plugin") is not None:
            options["fsdp_plugin"].mixed_precision_policy = None
        original(accelerator, *args, **{**options, **self.observation.arguments})
        if accelerator.mixed_precision != "no":
            raise ValueError(f"float32 is compared, and DeepSpeed's configuration has {accelerator.mixed_precision}")
        accelerator.dataloader_config.split_batches = accelerator.dataloader_config.use_seedable_sampler = True
        accelerator.engine.context.split_batches = True
        self._accelerator = accelerator

    def _prepare(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        for item in (*args, *kwargs.values()):
            for kind, change in CHANGES.items():
                if isinstance(item, kind):
                    change(item, self.observation)
        prepared = original(accelerator, *args, **kwargs)
        for model in accelerator._prepared.wrapped:
            if not hasattr(model, "_is_observed"):
                model._is_observed = True
                model.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        return prepared

    def _block(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        self.facts["has_blocks"] = True
        return original(accelerator, *args, **kwargs)

    # ---- recording ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Before the first forward pass, when programs have loaded their weights."""
        if not self.facts["began"] and torch.is_grad_enabled():
            self.parameters = self._full_parameters()
            self.facts["began"] = True
            self.write()  # a rank that is killed later cannot

    def _backward(self, original: Any, accelerator: Any, loss: Any, weight: Any = None, **kwargs: Any) -> Any:
        self._losses.append((float(loss.detach()), 1.0 if weight is None else float(weight)))
        return original(accelerator, loss, weight, **kwargs)

    def _clip(
        self, original: Any, accelerator: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        norm = original(accelerator, parameters, max_norm, *args, **kwargs)
        if accelerator.sync_gradients and norm is not None:
            self._norms.append(float(norm))
            self.facts["max_norm"] = float(max_norm)
        return norm

    def _step(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        accelerator = self._accelerator
        if not accelerator.sync_gradients:
            return original(optimizer, *args, **kwargs)
        if not self._norms:  # the script does not clip
            parameters = [one for model in accelerator._prepared.wrapped for one in model.parameters()]
            self._norms.append(float(accelerator._stepping.clip_grad_norm_(parameters, math.inf, 2.0)))
        result = original(optimizer, *args, **kwargs)
        self._record()
        return result

    def _record(self) -> None:
        state = self._accelerator.gradient_state
        average_over = state.plugin_kwargs.get("average_over", "steps")
        total = float(state.num_steps) if average_over == "steps" else sum(weight for _, weight in self._losses)
        loss = sum(loss * weight for loss, weight in self._losses)
        self.steps.append({"loss": loss, "weight": total, "norm": math.hypot(*self._norms)})
        self.facts["num_steps"] = state.num_steps
        self._losses, self._norms = [], []
        before, self.parameters = self.parameters, self._full_parameters()
        self.updates.append({name: after - before[name] for name, after in self.parameters.items()})
        if len(self.steps) == self.observation.num_steps:
            raise EndOfRun

    def _full_parameters(self) -> dict[str, torch.Tensor]:
        accelerator = self._accelerator
        keeps = accelerator.is_main_process
        tensors: dict[str, torch.Tensor] = {}
        with accelerator.engine.keeping_full_states(keeps):
            for index, model in enumerate(accelerator._prepared.wrapped):
                prefix = f"{index}." if index else ""
                for name, value in accelerator.engine.full_state_dict(model).items():
                    if keeps and value.is_floating_point():
                        tensors[prefix + name] = value.detach().to("cpu", torch.float32, copy=True)
        return tensors

    def write(self) -> None:
        """Write what was recorded so far into files of this rank."""
        folder = self.observation.folder
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0:
            norms = {name: float(value.norm()) for name, value in self.parameters.items()}
            torch.save({"updates": self.updates, "norms": norms}, os.path.join(folder, "updates.pt"))
        with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as file:
            json.dump({"steps": self.steps, **self.facts}, file)


def _wrap(owner: Any, name: str, observed: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return observed(original, *args, **kwargs)

    setattr(owner, name, call)


# ---- changes of what a script prepares --------------------------------------------------------------------------------


def _exact(model: torch.nn.Module, observation: Observation) -> None:
    """Convert a model to float32, and set every rate of dropout to 0."""
    model.float()
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
                setattr(module, name, 0.0)


def _with_larger_eps(optimizer: Any, observation: Observation) -> None:
    """Adam divides a gradient by its magnitude: without this, elements whose gradient is rounding alone would take full steps."""
    for group in optimizer.param_groups:
        if isinstance(group.get("eps"), float):
            group["eps"] = max(group["eps"], EPS)


def _with_global_batch(loader: Any, observation: Observation) -> None:
    """Set the batch size, so that the same batch can be split between all numbers of ranks."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            vars(owner)["batch_size"] = observation.global_batch_size(size)


CHANGES: dict[type, Callable[[Any, Observation], None]] = {
    torch.nn.Module: _exact,
    torch.optim.Optimizer: _with_larger_eps,
    torch.utils.data.DataLoader: _with_global_batch,
}


def main(words: list[str]) -> None:
    """Run a script: an `Observation` as JSON, then the script and its arguments."""
    settings, script, *arguments = words
    observation = Observation(**json.loads(settings))
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    import_module("accelerate.utils").set_seed(0)
    observer = Observer(observation)
    observer.install()
    try:
        if observation.is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except EndOfRun:
        pass
    except Exception as error:
        observer.facts["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        observer.write()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
