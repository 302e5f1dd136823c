"""Which rank of a pipeline holds which tensor of a model, and gathering full state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_integrations.parallel.full_state import distribute_like
from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_integrations.parallel.pipeline.shapes import TensorShape
from accel_integrations.parallel.pipeline.split import ModelSplit
from accel_ops.modules import full_tensor, to_local


@dataclass
class StageLayout:
    """The tensors of a full model by name, recorded before it is split.

    Attributes:
        shapes: Shape and dtype of each entry of the model's state dict, in order.
        stages: For each entry, the stages that hold it; several for tied weights, and for parameters that belong to
            no module of the chain.
        first_names: For entries that are one tensor, the name of the first of them.
        order: Names of all parameters, in order.
        names: The name of each parameter that is still alive.
    """

    shapes: dict[str, TensorShape]
    stages: dict[str, tuple[int, ...]]
    first_names: dict[str, str]
    order: list[str]
    names: Any = field(default_factory=WeakIdKeyDictionary)

    @classmethod
    def of(cls, model: nn.Module, split: ModelSplit) -> StageLayout:
        """The layout of a model, which is not split yet."""
        entries = {name: value for name, value in model.state_dict(keep_vars=True).items() if _is_tensor(value)}
        placed = split.stages()
        held: dict[int, set[int]] = {}
        first: dict[int, str] = {}
        for name, value in entries.items():
            held.setdefault(id(value), set()).update(_stages_of(name, placed, split.num_stages))
            first.setdefault(id(value), name)
        layout = cls(
            {name: TensorShape.of(value) for name, value in entries.items()},
            {name: tuple(sorted(held[id(value)])) for name, value in entries.items()},
            {name: first[id(value)] for name, value in entries.items()},
            [name for name, _ in model.named_parameters()],
        )
        layout.note_names(model)
        return layout

    def note_names(self, model: nn.Module) -> None:
        """Record the names of a model's parameters, some of which may have been replaced."""
        for name, parameter in model.named_parameters():
            self.names[parameter] = self.first_names[name]

    def shared_parameters(self, group: PipelineGroup) -> dict[str, tuple[int, ...]]:
        """Parameters that several ranks hold, by their first name, with these ranks in order of stages."""
        ranks_by_name = {}
        for name in self.order:
            ranks = tuple(dict.fromkeys(group.rank_of(stage) for stage in self.stages[name]))
            if len(ranks) > 1:
                ranks_by_name[name] = ranks
        return ranks_by_name

    def own_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of this rank, by their first name."""
        return {self.first_names[name]: parameter for name, parameter in model.named_parameters()}

    def complete_ties(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """A pre-hook of `load_state_dict`: add the names of tied weights under which they were not saved.

        The split model does not have them where other stages hold them.
        """
        parameters = dict(module.named_parameters())
        names = [name for name in self.shapes if prefix + name in state_dict]
        present = {self.first_names[name]: state_dict[prefix + name] for name in names}
        for name, first in self.first_names.items():
            if first in present and prefix + name not in state_dict:
                value = present[first]
                state_dict[prefix + name] = distribute_like(value, parameters[name]) if name in parameters else value

    def full_state_dict(
        self, own: dict[str, torch.Tensor], group: PipelineGroup, keep: bool = True
    ) -> dict[str, torch.Tensor]:
        """The full model's tensors, gathered one at a time.

        Args:
            own: The tensors of this rank, by name; returned as they are, unless they are DTensors. Those of other ranks,
                and full tensors of DTensors, are returned in CPU memory.
            group: The pipeline group, all ranks of which must call this.
            keep: Whether this rank needs the result; an empty dict otherwise.
        """
        by_first = {self.first_names[name]: tensor for name, tensor in own.items() if name in self.first_names}
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            first = self.first_names[name]
            if first == name:
                source = group.rank_of(self.stages[name][0])
                tensors[name] = broadcast_from(by_first.get(name), shape, group, source, keep)
            else:
                tensors[name] = tensors[first]
        return tensors if keep else {}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _stages_of(name: str, placed: dict[str, int], num_stages: int) -> Sequence[int]:
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        stage = placed.get(".".join(parts[:depth]))
        if stage is not None:
            return (stage,)
    return range(num_stages)  # in no stage: every rank holds it


def broadcast_from(
    own: torch.Tensor | None, shape: TensorShape, group: PipelineGroup, source: int, keep: bool = True
) -> Any:
    """Broadcast a tensor that one rank of the pipeline holds, from there.

    Args:
        own: The tensor of a rank that holds it, perhaps a DTensor; None on others.
        shape: Its full shape.
        group: The pipeline group.
        source: The rank in it that sends.
        keep: Whether this rank needs the tensor.

    Returns:
        The rank's own tensor, or the full one in CPU memory; None without `keep`.
    """
    is_plain = own is not None and to_local(own) is own
    if group.rank == source:
        assert own is not None
        travelling = full_tensor(own).detach().contiguous().to(group.device)
    else:
        travelling = shape.empty(group.device)
    group.broadcast(travelling, source)
    if not keep:
        return None
    return own if is_plain else travelling.cpu()


# ---- optimizers -----------------------------------------------------------------------------------------------------


class OptimizerLayout:
    """The parameters of an optimizer by name, including those of other ranks.

    Args:
        optimizer: Made for the full model, or for the stages of this rank.
        layouts: The layouts of all models split so far.
        group: The pipeline group, all ranks of which must make this.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layouts: Sequence[StageLayout], group: PipelineGroup) -> None:
        self.group = group
        names = [
            [_name_in(layouts, parameter) for parameter in param_group["params"]]
            for param_group in optimizer.param_groups
        ]
        everybody: list[Any] = [None] * group.size
        dist.all_gather_object(everybody, names, group=group.process_group)
        self.param_groups = [
            list(_merged([groups[index] for groups in everybody], layouts)) for index in range(len(names))
        ]

    def keep_own(
        self, optimizer: torch.optim.Optimizer, own: Sequence[torch.Tensor], layouts: Sequence[StageLayout]
    ) -> None:
        """Remove parameters of other ranks from the optimizer; parameter groups keep their options."""
        here = {id(parameter) for parameter in own}
        for param_group in optimizer.param_groups:
            gone = [one for one in param_group["params"] if _name_in(layouts, one) is not None and id(one) not in here]
            for parameter in gone:
                optimizer.state.pop(parameter, None)
            away = {id(parameter) for parameter in gone}
            param_group["params"] = [parameter for parameter in param_group["params"] if id(parameter) not in away]

    def full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, layouts: Sequence[StageLayout], keep: bool = True
    ) -> dict[str, Any]:
        """The full optimizer state dict, as of the unsplit model; all ranks must call this.

        Args:
            optimizer: The plain optimizer of this rank.
            layouts: The layouts of all models.
            keep: Whether this rank needs the result; an empty dict otherwise.
        """
        local_state = dict(self._own_state(optimizer, layouts))
        state: dict[int, dict[str, Any]] = {}
        for source in range(self.group.size):
            shapes = {
                index: {key: TensorShape.of(value) if _is_tensor(value) else value for key, value in entry.items()}
                for index, entry in local_state.items()
            }
            for index, entry in self.group.broadcast_object(shapes, source).items():
                received = {
                    key: broadcast_from(local_state.get(index, {}).get(key), shape, self.group, source, keep)
                    if isinstance(shape, TensorShape)
                    else shape
                    for key, shape in entry.items()
                }
                state.setdefault(index, received)
        if not keep:
            return {}
        return {"state": dict(sorted(state.items())), "param_groups": self._full_param_groups(optimizer)}

    def own_entries(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, layouts: Sequence[StageLayout]
    ) -> dict[str, Any]:
        """The entries of a full optimizer state dict for this rank's parameters, as `load_state_dict` takes them.

        Raises:
            ValueError: The state is that of an optimizer with other parameter groups.
        """
        sizes = [len(param_group["params"]) for param_group in state["param_groups"]]
        if sizes != [len(names) for names in self.param_groups]:
            raise ValueError(
                f"The optimizer state has parameter groups of {sizes} parameters, but the optimizer of this run has "
                f"groups of {[len(names) for names in self.param_groups]}. Load a state of an optimizer with the same "
                "groups."
            )
        indices = self._own_indices(optimizer, layouts)
        local = {index: position for position, index in enumerate(one for group in indices for one in group)}
        groups = [
            {**saved, "params": [local[index] for index in group]}
            for saved, group in zip(state["param_groups"], indices, strict=True)
        ]
        saved_state = {index: state["state"][index] for index in local if index in state["state"]}
        return {"state": {local[index]: entry for index, entry in saved_state.items()}, "param_groups": groups}

    def _own_indices(self, optimizer: torch.optim.Optimizer, layouts: Sequence[StageLayout]) -> list[list[int]]:
        """For each parameter of this rank, its index in the optimizer of the full model."""
        indices, start = [], 0
        for names, param_group in zip(self.param_groups, optimizer.param_groups, strict=True):
            numbers = {name: start + position for position, name in enumerate(names)}
            loose = iter(start + position for position, name in enumerate(names) if name is None)
            indices.append(
                [
                    next(loose) if (name := _name_in(layouts, parameter)) is None else numbers[name]
                    for parameter in param_group["params"]
                ]
            )
            start += len(names)
        return indices

    def _own_state(
        self, optimizer: torch.optim.Optimizer, layouts: Sequence[StageLayout]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for indices, param_group in zip(self._own_indices(optimizer, layouts), optimizer.param_groups, strict=True):
            for index, parameter in zip(indices, param_group["params"], strict=True):
                if parameter in optimizer.state:
                    yield index, dict(optimizer.state[parameter])

    def _full_param_groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        groups, start = [], 0
        for names, param_group in zip(self.param_groups, optimizer.param_groups, strict=True):
            settings = {key: value for key, value in param_group.items() if key != "params"}
            groups.append({**settings, "params": list(range(start, start + len(names)))})
            start += len(names)
        return groups


def _name_in(layouts: Sequence[StageLayout], parameter: torch.Tensor) -> tuple[int, str] | None:
    """Index of the model, and the name in it; None for a parameter of none of them."""
    for number, layout in enumerate(layouts):
        name = layout.names.get(parameter)
        if name is not None:
            return number, name
    return None


def _merged(groups: Sequence[Sequence[tuple[int, str] | None]], layouts: Sequence[StageLayout]) -> Iterator[Any]:
    """The names of one parameter group over all ranks, in the order of the full model."""
    if all(group == groups[0] for group in groups):
        yield from groups[0]
        return
    named = {name for group in groups for name in group if name is not None}
    position = {(n, name): place for n, layout in enumerate(layouts) for place, name in enumerate(layout.order)}
    yield from sorted(named, key=lambda name: (name[0], position[name]))
    yield from (name for name in groups[0] if name is None)
