"""Finds optimizers that must see whole parameters, where ranks hold shards: tries a few steps on a small one, whole and sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch

from accel_integrations.prepared.optimizer import needs_closure
from accel_ops.collectives.objects import gather_object
from accel_ops.modules import full_tensor, to_local
from accel_state.processes import PartialState

KNOWN_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in [
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "SGD",
        "SparseAdam",
    ]
)
"""Optimizers that need no trial: they update every element of a parameter by itself."""
ELEMENTS = 16  # of a rank
NUM_STEPS = 5
OF_OTHERS = frozenset({"params", "param_names", "initial_lr"})
"""Entries of a parameter group that are no options of the optimizer."""

Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of each element of a parameter: where it starts, where its loss is least, and how steep its loss is."""


def check_sharded_parameters(optimizer: torch.optim.Optimizer, is_flat: bool, engine: str) -> None:
    """Check that an optimizer takes the steps on shards that it would take on whole parameters; all ranks call this.

    Args:
        optimizer: Bound to the parameters that it is going to update, of which those that are DTensors are sharded.
        is_flat: Whether each rank holds flat shards of the parameters instead, without their shapes.
        engine: What shards the parameters, for the error message.

    Raises:
        ValueError: It does not; the message says what to use instead. An optimizer that cannot be tried passes.
    """
    if is_flat and _has_state_of_whole_parameters(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} made its state before {engine} replaced parameters by flat shards. Create the "
            "optimizer from the parameters of the prepared model, and prepare it afterwards."
        )
    if type(optimizer) in KNOWN_ELEMENTWISE:
        return
    for where, problem in _problems_of(optimizer, is_flat):
        raise ValueError(
            f"{type(optimizer).__name__} cannot update shards of parameters, which is what ranks hold under {engine}{where}: {problem}. Choose "
            "an optimizer that updates every element by itself, such as torch.optim.AdamW, or train without sharding, with DDP."
        )


def _problems_of(optimizer: torch.optim.Optimizer, is_flat: bool) -> Iterator[tuple[str, str]]:
    """What goes wrong, and with which sharding: the same on all ranks."""
    if needs_closure(optimizer):
        sharded = _sharded_parameters(optimizer)
        searches = any(
            group.get("line_search_fn") for group in optimizer.param_groups
        )  # which mixes DTensors and tensors
        if is_flat or (sharded and (searches or not all(map(_can_be_flattened, sharded)))):
            yield "", "it makes one vector of the gradients of all parameters"
        return
    for trial in [_flat_trial(optimizer)] if is_flat else _trials_on_meshes(optimizer):
        problem = trial.problem_of(optimizer)
        if problem is not None:
            yield trial.where, f"tried on a small parameter, it {problem}"


@dataclass(frozen=True)
class _Trial:
    """A small parameter, of which this rank holds a shard.

    Attributes:
        shard: The loss of what this rank holds.
        whole: The same of the whole parameter, on every rank.
        comparable: The elements of the whole parameter that `full_tensor` makes of a shard.
        tolerance: Of the largest change.
        where: What shards it, for the error message.
    """

    shard: Loss
    whole: Loss
    comparable: Callable[[torch.Tensor], torch.Tensor]
    tolerance: float
    where: str = ""

    def problem_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """What goes wrong on shards, the same on all ranks; None if nothing does, or if whole parameters cannot be tried."""
        device = self.whole[0].device
        rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with rng, torch.compiler.set_stance("force_eager"):  # compiling a step would take seconds
            try:
                expected = _train(optimizer, self.whole)
            except Exception:
                return None  # on all ranks alike
            problem = None
            try:
                reached = _train(optimizer, self.shard)
            except Exception as error:
                problem = "raises " + f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(".: ")
            else:
                difference = (reached - torch.stack(list(map(self.comparable, expected)))).abs().max()
                by_chance = (_train(optimizer, self.whole, seed=1) - expected).abs().max()
                change = (expected - self.whole[0]).abs().max()
                if not difference <= max(self.tolerance * change, 3 * by_chance):
                    problem = "takes other steps"
        return next(filter(None, gather_object([problem])), None)


def _has_state_of_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape != weight.shape
        for weight, state in optimizer.state.items()
        for value in state.values()
    )


def _flat_trial(optimizer: torch.optim.Optimizer) -> _Trial:
    state = PartialState()
    device = next(weight.device for group in optimizer.param_groups for weight in group["params"])
    whole = [one.view(4 * state.num_processes, -1) for one in _loss(0, ELEMENTS * state.num_processes, device)]
    own = slice(ELEMENTS * state.process_index, ELEMENTS * (state.process_index + 1))
    return _Trial(
        _as_loss(one.flatten()[own].clone() for one in whole),
        _as_loss(whole),
        lambda one: one.flatten()[own],
        1e-3,
    )


def _trials_on_meshes(optimizer: torch.optim.Optimizer) -> Iterator[_Trial]:
    """One for every way in which DTensors among the parameters are sharded."""
    sharded = _sharded_parameters(optimizer)
    for mesh, placements in dict.fromkeys((weight.device_mesh, weight.placements) for weight in sharded):
        axes = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
        if not axes or any(placement.dim > 1 for placement in placements if placement.is_shard()):
            continue
        index = 0
        for axis in axes:
            index = index * mesh.size(axis) + mesh.get_local_rank(axis)
        local = _loss(
            ELEMENTS * index, ELEMENTS, next(to_local(one).device for one in sharded if one.device_mesh == mesh)
        )
        shard = [type(sharded[0]).from_local(one.view(4, 4), mesh, placements, run_check=False) for one in local]
        names = mesh.mesh_dim_names or ()
        where = f" with the mesh dimensions {', '.join(names)}" if names else ""
        # An optimizer that computes in bfloat16, as Muon does, rounds DTensors differently, by about 0.01 of a change.
        yield _Trial(_as_loss(shard), _as_loss(map(full_tensor, shard)), lambda one: one, 0.1, where)


def _sharded_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return [weight for weight in weights if to_local(weight) is not weight]


def _can_be_flattened(weight: torch.Tensor) -> bool:
    """Whether torch makes a vector of a DTensor, which it does not where ranks hold shards of different sizes."""
    try:
        weight.detach().view(-1)
    except RuntimeError:
        return False
    return True


def _loss(first: int, count: int, device: torch.device) -> Loss:
    """Of elements that differ much from rank to rank."""
    index = torch.arange(first, first + count, dtype=torch.float32, device=device)
    return torch.sin(index), torch.cos(3 * index), (1 + (index // ELEMENTS) % 3 * 4 + index % 5) / 16


def _as_loss(tensors: Any) -> Loss:
    start, least, steepness = tensors
    return start, least, steepness


def _train(optimizer: Any, loss: Loss, seed: int = 0) -> torch.Tensor:
    """The full parameters after each of a few steps of an optimizer of the same class and options, for each kind of group."""
    torch.manual_seed(seed)
    start, least, steepness = loss
    groups = [
        {**group, "params": [torch.nn.Parameter(start.clone())]}
        for group in {_kind_of(options): options for options in map(_options_of, optimizer.param_groups)}.values()
    ]
    required = [
        name
        for name, argument in list(signature(type(optimizer).__init__).parameters.items())[2:]
        if argument.default is Parameter.empty and name in groups[0]
    ]
    twin = type(optimizer)(groups, **{name: groups[0][name] for name in required})
    if callable(getattr(twin, "train", None)):
        twin.train()  # of schedule-free optimizers
    weights: list[Any] = [group["params"][0] for group in groups]

    after: list[torch.Tensor] = []

    for _ in range(NUM_STEPS):
        steepness_now = steepness ** (0.5 + len(after) % 3 / 2)
        for weight in weights:
            weight.grad = steepness_now * (weight.detach() - least)
        twin.step()
        after += [full_tensor(weight.detach()).clone() for weight in weights]
    return torch.stack(after)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name not in OF_OTHERS}
    if options.get("lr") is not None:  # which is 0 at the beginning of a warmup, and would let large ones diverge
        options["lr"] = min(float(options["lr"]), 1.0) or 0.01
    return options


def _kind_of(options: dict[str, Any]) -> str:
    """Equal for groups that differ in numbers alone."""
    return repr({name: value for name, value in options.items() if isinstance(value, (bool, str))})
