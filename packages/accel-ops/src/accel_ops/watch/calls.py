"""The collectives that this process has called, from the flight recorder that torch keeps of them anyway."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from accel_state.libraries import is_torch_version

MOST_CALLS = 48
"""How many calls of a group are told to other ranks: they are at most a few apart."""
MOST_ENTRIES = 512  # of the recorder that are looked at
BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""torch's variable: how many calls its recorder keeps; 2.9 keeps none by default, later versions 2,000."""
DUMPS = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
"""The function of torch that returns the recorder of a backend, in the versions that have it."""

EQUAL_ELEMENTS = frozenset({"all_reduce", "allreduce", "reduce", "all_gather", "allgather"})
"""Collectives in which each rank gives equally many elements of one dtype."""
EQUAL_BYTES = frozenset({"broadcast"})
UNEVEN = frozenset({"nccl:all_gather"})
"""Collectives of a backend that take different sizes on different ranks."""
NEAR_NAMES = {
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
}
ITEM_BYTES = {
    "Bool": 1, "Byte": 1, "Char": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8,
    "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
WORDS_OF_DTYPES = {
    "Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16",
    "BFloat16": "bfloat16", "Float": "float32", "Double": "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective.

    Attributes:
        number: Its number among the collectives of the process group, from 1.
        name: The collective of the backend, such as `"all_reduce"`.
        dtypes: The dtypes of its input tensors.
        sizes: Their shapes.
        nanoseconds: When it was called, by the clock of its rank.
        is_done: Whether it is known to be completed; gloo never tells.
    """

    number: int
    name: str
    dtypes: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    nanoseconds: int
    is_done: bool = False

    @property
    def data(self) -> str:
        """Its tensors, by dtype and shape."""
        tensors = zip(self.dtypes, self.sizes, strict=False)
        return ", ".join(f"{WORDS_OF_DTYPES.get(dtype, dtype)}{list(shape)}" for dtype, shape in tensors)

    def matches(self, other: Call) -> bool:
        """Whether calls of two ranks under one number may be one collective."""
        return self.name == other.name and self.amount == other.amount

    @property
    def amount(self) -> tuple[Any, ...]:
        """What must be equal on all ranks, apart from the name."""
        if self.name in EQUAL_ELEMENTS:
            return self.dtypes, tuple(map(prod, self.sizes))
        if self.name in EQUAL_BYTES:
            tensors = zip(self.dtypes, self.sizes, strict=False)
            return (sum(ITEM_BYTES.get(dtype, 0) * prod(shape) for dtype, shape in tensors),)
        return ()

    def to_json(self) -> list[Any]:
        """The call as a JSON list."""
        shapes = list(map(list, self.sizes))
        return [self.number, self.name, list(self.dtypes), shapes, self.nanoseconds, self.is_done]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Call:
        """The inverse of `to_json`."""
        number, name, dtypes, sizes, nanoseconds, is_done = values
        return cls(number, name, tuple(dtypes), tuple(map(tuple, sizes)), nanoseconds, is_done)


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The last calls in one process group.

    Attributes:
        ranks: The ranks of the group, among all.
        calls: The calls by number.
    """

    ranks: tuple[int, ...]
    calls: Mapping[int, Call]

    @property
    def last(self) -> int:
        """The number of the last call; 0 if there was none."""
        return max(self.calls, default=0)

    def to_json(self) -> list[Any]:
        """The calls as a JSON list."""
        return [list(self.ranks), [call.to_json() for call in self.calls.values()]]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> GroupCalls:
        """The inverse of `to_json`."""
        calls = [Call.from_json(each) for each in values[1]]
        return cls(tuple(values[0]), {call.number: call for call in calls})


def start_recorder() -> None:
    """Have torch record calls; to be called before the first process group is made."""
    if is_torch_version("<", "2.11"):
        os.environ.setdefault(BUFFER_SIZE, "2000")


def read_calls(since_nanoseconds: int) -> dict[str, GroupCalls]:
    """Read the last calls of this process.

    Args:
        since_nanoseconds: When the present process groups were made, as in `time.time_ns`: earlier ones have the same names.

    Returns:
        The calls of each process group of this process by its name; groups without calls are among them.
    """
    members = _members()
    by_group: dict[str, dict[int, Call]] = {name: {} for name in members}
    for entry in _entries():
        group = entry["process_group"][0]
        if group in by_group and entry["time_created_ns"] >= since_nanoseconds and not entry["is_p2p"]:
            call = _call(entry)
            if call.number < max(by_group[group], default=0):  # they were those of an earlier group of this name
                by_group[group].clear()
            by_group[group][call.number] = call
    return {
        name: GroupCalls(members[name], {number: calls[number] for number in sorted(calls)[-MOST_CALLS:]})
        for name, calls in by_group.items()
    }


def count_calls() -> dict[str, int]:
    """How many collectives, sends and recvs this process has called in each process group, by its name."""
    from torch.distributed import distributed_c10d

    calls = {}
    groups: list[tuple[Any, str]] = list(distributed_c10d._world.pg_names.items())
    for group, name in groups:
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            calls[str(name)] = int(group._get_sequence_number_for_group())
    return calls


def _members() -> dict[str, tuple[int, ...]]:
    """The ranks of each process group, by its name."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return {str(world.pg_names[group]): tuple(ranks) for group, ranks in list(world.pg_group_ranks.items())}


def _entries() -> Iterator[dict[str, Any]]:
    """What the recorders hold. Their stacks are left out: they would import the compiler, which takes seconds."""
    import torch._C._distributed_c10d as c10d
    from torch.distributed import distributed_c10d

    backends = " ".join(map(str, distributed_c10d._world.pg_backend_config.values()))
    for backend, name in DUMPS.items():
        dump = getattr(c10d, name, None)
        if dump is not None and backend in backends:
            recorded = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
            yield from recorded.get("entries", ())[-MOST_ENTRIES:]


def _call(entry: Mapping[str, Any]) -> Call:
    full_name = str(entry["profiling_name"])
    name = full_name.rpartition(":")[2]
    name = NEAR_NAMES.get(name, name)
    sizes = () if full_name in UNEVEN else tuple(tuple(shape) for shape in entry["input_sizes"])
    is_done = entry.get("state") == "completed"
    number, at = int(entry["collective_seq_id"]), int(entry["time_created_ns"])
    return Call(number, name, tuple(entry["input_dtypes"]), sizes, at, is_done)
