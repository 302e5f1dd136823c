"""What a rehearsal found out about a rank. Does not import torch, for code that only prints it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

HOST = "data on the host"  # made by the script before its first step, such as a dataset
COMMUNICATION = "communication buffers"  # with the parameters that FSDP gathers
UPDATES = "optimizer step"  # what an optimizer allocates for the time of a step
RESERVE = 0.1  # of the device's memory: the context of the device, workspaces of kernels, fragmentation


@dataclass(frozen=True, slots=True)
class Exchange:
    """A kind of collective in a step.

    Attributes:
        name: Such as `"all-gather"`.
        group: The mesh dimension of its process group, or the number of its ranks.
        num_ranks: The number of ranks of the group.
        between_machines: Whether they are on several machines.
        count: How often it ran.
        num_bytes: Of one: the larger of input and output on a rank.
        in_background: Whether computing may go on meanwhile.
    """

    name: str
    group: str
    num_ranks: int
    between_machines: bool
    count: int
    num_bytes: int
    in_background: bool

    def seconds(self, gbps: float) -> float:
        """The time of all of them by the ring algorithm, with a bandwidth in 10^9 bytes per second."""
        return self.count * SENT.get(self.name, lambda n: 1.0)(self.num_ranks) * self.num_bytes / (gbps * 1e9)


SENT: dict[str, Any] = {  # the part of the bytes that each rank sends
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}


@dataclass(slots=True)
class Result:
    """The last step of a rehearsal.

    Attributes:
        world_size: The number of ranks.
        machines: The number of machines.
        steps: How many steps were taken.
        at_peak: Kind of memory -> bytes, at the peak of the last step.
        by_module: Module -> bytes that it allocated and that are alive at the peak.
        timeline: Number of operations so far, and kind of memory -> bytes.
        exchanges: The collectives.
        flops: Of matrix multiplications, convolutions and attention.
        seconds: The roofline of all operations, one after the other.
        shortest_seconds: FLOPs over the peak.
        batch: The samples of a batch; then the tokens of each, where it has token ids: integers in two dimensions.
        num_batches: How many batches the step took.
        data_ranks: How many ranks read different batches.
        largest_batch: The largest batch of a rank that fits; None where it was not looked for, 0 where none fits.
        notes: What was guessed or skipped.
        rank: The rank.
    """

    world_size: int
    machines: int
    steps: int
    at_peak: dict[str, int]
    by_module: dict[str, int] = field(default_factory=dict)
    timeline: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    flops: int = 0
    seconds: float = 0.0
    shortest_seconds: float = 0.0
    batch: list[int] = field(default_factory=list)
    num_batches: int = 0
    data_ranks: int = 1
    largest_batch: int | None = None
    notes: list[str] = field(default_factory=list)
    rank: int = 0

    @property
    def peak_bytes(self) -> int:
        """The peak on the device."""
        return on_device(self.at_peak)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Read what `as_dict` wrote."""
        return cls(**{**values, "exchanges": [Exchange(**exchange) for exchange in values["exchanges"]]})


def on_device(kinds: dict[str, int]) -> int:
    """The bytes of all kinds of memory on the device together."""
    return sum(num_bytes for kind, num_bytes in kinds.items() if kind != HOST)
