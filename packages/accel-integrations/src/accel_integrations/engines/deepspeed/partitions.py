"""What a rank holds of an engine of DeepSpeed: its weights, its flat buffers, and how they are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from typing_extensions import override

from accel_integrations.prepared.parameters import plain_name
from accel_integrations.training_state.formats.flat_layout import FlatPiece, divided_pieces, joined_pieces
from accel_integrations.training_state.interface import Keys, StoredState

Shape = tuple[int, ...]


def full_shape(tensor: torch.Tensor) -> Shape:
    """The shape of a parameter, also of one that ZeRO has sharded."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


class Partitions(ABC):
    """The parameters of an engine of DeepSpeed, as one of its kinds of optimizer keeps them.

    Args:
        engine: DeepSpeed's engine.

    Attributes:
        optimizer: The optimizer of torch inside; None where the engine does not train.
        shapes: Names and full shapes of the parameters in each flat buffer, in their order there.
    """

    optimizer: Any
    shapes: list[dict[str, Shape]]

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = None
        self.shapes = []

    @abstractmethod
    def groups(self) -> list[tuple[Mapping[str, Any], Sequence[int]]]:
        """Each parameter group of the optimizer, with the positions of its flat buffers."""

    @abstractmethod
    def fill(self, index: int, stored: StoredState, keys_of: Callable[[str], Keys | None]) -> torch.Tensor:
        """Read this rank's share of a flat buffer into CPU memory.

        Args:
            index: Which buffer.
            stored: The state to read from.
            keys_of: The entry of a parameter in it; None where it has none, which gives zeros.
        """

    def read_flat_weights(self, stored: StoredState, sources: Mapping[str, Keys]) -> list[torch.Tensor]:
        """Read this rank's share of the weights in each flat buffer."""
        return [self.fill(index, stored, sources.get) for index in range(len(self.shapes))]

    def read_weights(self, stored: StoredState, sources: Mapping[str, Keys]) -> dict[str, Any]:
        """Read what this rank holds of the model beside flat buffers."""
        return {name: stored.read_entry(keys) for name, keys in sources.items()}

    def with_parameters(self) -> AbstractContextManager[None]:
        """A context in which the groups of the optimizer have their flat parameters."""
        return nullcontext()

    def adapt(self, state: dict[str, Any]) -> None:
        """Convert step counts for optimizers of DeepSpeed, which count with int, also in parameter groups."""
        if not type(self.optimizer).__module__.startswith("deepspeed."):
            return
        for values in state["state"].values():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"] = int(values["step"])
        for group in state["param_groups"]:
            steps = [state["state"][number].get("step") for number in group["params"] if number in state["state"]]
            if steps and "step" in group:
                group["step"] = steps[0]

    @abstractmethod
    def load(
        self, weights: Mapping[str, Any], flat: Sequence[torch.Tensor], state: dict[str, Any] | None, strict: bool
    ) -> None:
        """Load everything into the engine.

        Args:
            weights: From `read_weights`.
            flat: From `read_flat_weights`.
            state: The state of the optimizer inside, with a parameter for each flat buffer; None to keep it.
            strict: Whether all names must be there.
        """


@final
class PlainPartitions(Partitions):
    """Full parameters: without ZeRO, or without an optimizer in stages below 3."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        if isinstance(engine.optimizer, torch.optim.Optimizer):
            self.optimizer = engine.optimizer
            self.shapes = [
                {_name(engine, one): full_shape(one)}
                for group in self.optimizer.param_groups
                for one in group["params"]
            ]

    @override
    def groups(self) -> list[tuple[Mapping[str, Any], Sequence[int]]]:
        """Each parameter is a buffer of its own."""
        groups: list[tuple[Mapping[str, Any], Sequence[int]]] = []
        begin = 0
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            end = begin + len(group["params"])
            groups.append((group, range(begin, end)))
            begin = end
        return groups

    @override
    def read_flat_weights(self, stored: StoredState, sources: Mapping[str, Keys]) -> list[torch.Tensor]:
        """None: the weights are in the model."""
        return []

    @override
    def fill(self, index: int, stored: StoredState, keys_of: Callable[[str], Keys | None]) -> torch.Tensor:
        """Read the full tensor of a parameter's shape."""
        ((name, shape),) = self.shapes[index].items()
        keys = keys_of(name)
        return torch.zeros(shape) if keys is None else stored.read_full(keys)

    @override
    def load(
        self, weights: Mapping[str, Any], flat: Sequence[torch.Tensor], state: dict[str, Any] | None, strict: bool
    ) -> None:
        """Load the model and the optimizer as without DeepSpeed."""
        self.engine.module.load_state_dict(weights, strict=strict)
        if state is not None:
            self.optimizer.load_state_dict(state)


@final
class JoinedPartitions(Partitions):
    """Stages 1 and 2: a flat buffer for each parameter group."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._zero = engine.optimizer
        self.optimizer = self._zero.optimizer
        self.shapes = [
            {_name(engine, one): full_shape(one) for one in group} for group in self._zero.round_robin_bit16_groups
        ]

    @override
    def groups(self) -> list[tuple[Mapping[str, Any], Sequence[int]]]:
        return [(group, (index,)) for index, group in enumerate(self.optimizer.param_groups)]

    @override
    def fill(self, index: int, stored: StoredState, keys_of: Callable[[str], Keys | None]) -> torch.Tensor:
        """Read a stretch of all parameters (float32, 1-dim)."""
        group = self._zero.real_dp_process_group[index]
        length = self._zero.single_partition_of_fp32_groups[index].numel()
        paddings = getattr(self._zero, "round_robin_bit16_padding", None)  # since DeepSpeed 0.19
        pieces = joined_pieces(
            self.shapes[index], [length] * dist.get_world_size(group), None if paddings is None else paddings[index]
        )
        return _fill(length, (piece for piece in pieces if piece.rank == dist.get_rank(group)), stored, keys_of)

    @override
    def load(
        self, weights: Mapping[str, Any], flat: Sequence[torch.Tensor], state: dict[str, Any] | None, strict: bool
    ) -> None:
        """Load the model, then hand DeepSpeed what it would have read from the file of this rank."""
        self.engine.module.load_state_dict(weights, strict=strict)
        state_dict = {
            **self._zero.state_dict(),
            "base_optimizer_state": state,
            "single_partition_of_fp32_groups": list(flat),
        }
        _hand_over(self._zero, state_dict, load_optimizer_states=state is not None, load_from_fp32_weights=True)


@final
class DividedPartitions(Partitions):
    """Stage 3: a share of every parameter, in some flat buffers for each parameter group."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._zero = engine.optimizer
        self.optimizer = self._zero.optimizer
        self.shapes = [{_name(engine, one): full_shape(one) for one in group} for group in self._zero.fp16_groups]

    @override
    def groups(self) -> list[tuple[Mapping[str, Any], Sequence[int]]]:
        """Several buffers for each, in order."""
        group_of = self._zero.sub_group_to_group_id
        return [
            (group, [index for index in range(len(self.shapes)) if group_of[index] == number])
            for number, group in enumerate(self.optimizer.param_groups)
        ]

    @override
    def fill(self, index: int, stored: StoredState, keys_of: Callable[[str], Keys | None]) -> torch.Tensor:
        """Read a stretch of every parameter (float32, 1-dim)."""
        group = self._zero.dp_process_group
        length = self._zero.fp32_partitioned_groups_flat[index].numel()
        pieces = divided_pieces(self.shapes[index], dist.get_world_size(group))
        return _fill(length, (piece for piece in pieces if piece.rank == dist.get_rank(group)), stored, keys_of)

    @override
    def read_weights(self, stored: StoredState, sources: Mapping[str, Keys]) -> dict[str, Any]:
        """This rank's shares of frozen parameters (1-dim), and buffers."""
        tensors = self.engine.module.state_dict(keep_vars=True)
        trained = {name for shapes in self.shapes for name in shapes}
        weights: dict[str, Any] = {}
        for name, keys in sources.items():
            value = tensors[name]
            if not hasattr(value, "ds_tensor"):
                weights[name] = stored.read_entry(keys)
            elif _name(self.engine, value) not in trained:
                share = value.ds_tensor.numel()
                begin = dist.get_rank(self._zero.dp_process_group) * share
                if (count := min(share, value.ds_numel - begin)) > 0:
                    weights[name] = stored.read_range(keys, begin, count)
        return weights

    @contextmanager
    @override
    def with_parameters(self) -> Iterator[None]:
        """DeepSpeed gives the groups their parameters only while it needs them."""
        self._zero._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self._zero._clear_fp32_optimizer_param_groups()

    @override
    def load(
        self, weights: Mapping[str, Any], flat: Sequence[torch.Tensor], state: dict[str, Any] | None, strict: bool
    ) -> None:
        """Load frozen parameters and buffers, then hand DeepSpeed what it would have read from the file of this rank."""
        self._zero.checkpoint_event_prologue()
        tensors = self.engine.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in weights.items():
                held = getattr(tensors[name], "ds_tensor", None)
                if held is not None:
                    held.data[: len(value)].copy_(value)
                elif isinstance(value, torch.Tensor):
                    tensors[name].copy_(value)
        states = {**self._zero.state_dict(), "optimizer_state_dict": state, "fp32_flat_groups": list(flat)}
        _hand_over(self._zero, states, load_optimizer_states=state is not None)
        self._zero.checkpoint_event_epilogue()


def partitions_of(engine: Any) -> Partitions:
    """What this rank holds of an engine.

    Raises:
        ValueError: Its states are sharded in ways that only DeepSpeed's own files have.
    """
    zero = engine.optimizer
    partition_class = next((kind for name, kind in KINDS.items() if type(zero).__name__ == name), None)
    reasons = {
        "it has experts": getattr(engine, "has_moe_layers", False),
        "its layers are sharded (tensor_parallel)": engine.autotp_size() > 1,
        "its optimizer states are on NVMe": getattr(zero, "swap_optimizer", False),
        "its parameters are on NVMe": any(one is None for one in getattr(zero, "fp16_partitioned_groups_flat", ())),
        f"its optimizer is {type(zero).__name__}": partition_class is None
        and zero is not None
        and not isinstance(zero, torch.optim.Optimizer),
    }
    if reason := next((text for text, applies in reasons.items() if applies), None):
        raise ValueError(
            f"An engine of DeepSpeed can load this checkpoint only if DeepSpeed wrote it with the same settings, because "
            f"{reason}. Load it with the settings with which it was saved."
        )
    return (partition_class or PlainPartitions)(engine)


KINDS: dict[str, type[Partitions]] = {
    "DeepSpeedZeroOptimizer": JoinedPartitions,
    "DeepSpeedZeroOptimizer_Stage3": DividedPartitions,
}
"""By the class of DeepSpeed's optimizer."""


def _fill(
    length: int, pieces: Iterable[FlatPiece], stored: StoredState, keys_of: Callable[[str], Keys | None]
) -> torch.Tensor:
    buffer = torch.zeros(length)
    for piece in pieces:
        if (keys := keys_of(piece.name)) is not None:
            buffer[piece.position : piece.position + piece.count] = stored.read_range(keys, piece.begin, piece.count)
    return buffer


def _hand_over(zero: Any, state_dict: dict[str, Any], **options: Any) -> None:
    """Have an optimizer of DeepSpeed load a state, in a list by ranks of which it reads its own entry."""
    rank = dist.get_rank(zero.dp_process_group)
    zero.load_state_dict([state_dict] * (rank + 1), **options)


def _name(engine: Any, parameter: torch.Tensor) -> str:
    return plain_name(engine.param_names[parameter])
